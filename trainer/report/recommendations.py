"""What to change about a run: one table of rules, each with the figure that leads to it.

Progress lines, the report and `train --monitor-only` apply the same rules to what they have read.
A rule about an unknown figure does not apply. Imports no torch.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

STALL_CAUSES: Final = ("data", "checkpoint", "log")
"""Causes of stall that rules look at."""
_UNKNOWN = math.nan
"""Comparisons with it are false, so rules about unknown readings do not apply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """The readings that rules look at. Shares are from 0 to 1."""

    gpu_bytes: float = _UNKNOWN
    """Memory of the GPU in use."""
    gpu_total_bytes: float = _UNKNOWN
    gpu_busy: float = _UNKNOWN
    cpu_busy: float = _UNKNOWN
    core_busy: float = _UNKNOWN
    """Share of the time in which the busiest processor worked."""
    ram_used: float = _UNKNOWN
    """Share of the machine's memory in use."""
    workers: float = _UNKNOWN
    """Loader processes of the rank."""
    cores: float = _UNKNOWN
    """Processors that the rank may use."""
    data: float = _UNKNOWN
    """Share of the time in which the device waited for batches, then for checkpoints, and for
    progress lines."""
    checkpoint: float = _UNKNOWN
    log: float = _UNKNOWN
    accumulation: float = _UNKNOWN
    """Micro-batches of a step on a rank."""
    micro_batch_tokens: float = _UNKNOWN
    state_bytes: float = _UNKNOWN
    """Weights, gradients and moments on a rank."""
    peak_gpu_bytes: float = _UNKNOWN
    """Most memory of the GPU that the rank has held."""

    def updated(self, **values: float | None) -> "Readings":
        """Return these readings with other values. A value of None changes nothing."""
        known = {name: value for name, value in values.items() if value is not None}
        return dataclasses.replace(self, **known)

    @property
    def used(self) -> float:
        """Share of the GPU's memory in use."""
        return self.gpu_bytes / self.gpu_total_bytes

    @property
    def memory(self) -> str:
        """The GPU's memory in use, in words."""
        used, total = self.gpu_bytes / 1e9, self.gpu_total_bytes / 1e9
        return f"{used:.1f} of {total:.1f} GB of GPU memory ({self.used:.0%})"

    @property
    def more_workers(self) -> float:
        """Workers to advise: twice as many, at least 4, at most one for each processor."""
        return min(self.cores, max(4, 2 * self.workers))

    @property
    def whole_step_bytes(self) -> float:
        """Memory of a step of one micro-batch. Activations grow with the tokens."""
        return self.state_bytes + self.accumulation * (self.peak_gpu_bytes - self.state_bytes)

    @property
    def step_tokens(self) -> float:
        """Tokens of a step on a rank, padding included."""
        return self.accumulation * self.micro_batch_tokens


class Rule(NamedTuple):
    """A rule: its name, when it applies, and the sentence, which names the figure."""

    name: str
    """The stall cause that it is about, if any."""
    applies: Callable[[Readings], bool]
    sentence: Callable[[Readings], str]


_LEAST_BUSY = 0.70
_LEAST_MEMORY, _MOST_MEMORY = 0.60, 0.95
_FULL_CORE, _MANY_CORES = 0.98, 0.80
"""Below the second share, it is a single processor that works without a pause."""
_LEAST_DATA, _LEAST_WRITING = 0.05, 0.02
_SMALL_MODEL = 0.02
"""Share of the GPU's memory."""

RULES = (
    Rule(
        "memory full",
        lambda x: x.used > _MOST_MEMORY,
        lambda x: (
            f"{x.memory} are in use, above 95 %: the next long batch may not fit. Lower "
            "`--micro-batch-tokens`, or add `--recompute`"
        ),
    ),
    Rule(
        "busy",
        lambda x: x.gpu_busy < _LEAST_BUSY,
        lambda x: (
            f"the GPU is {x.gpu_busy:.0%} busy, below 70 %: raise `--micro-batch-tokens` and "
            "`--num-workers`; `report RUN` lists what the GPU waits for"
        ),
    ),
    Rule(
        "data",
        lambda x: (
            (x.data >= _LEAST_DATA or x.gpu_busy < _LEAST_BUSY) and x.workers < min(4, x.cores)
        ),
        lambda x: (
            f"{x.workers:.0f} loader workers"
            + (f", and batches come late {x.data:.0%} of the time" if x.data >= _LEAST_DATA else "")
            + f": raise `--num-workers` to {x.more_workers:.0f}, of {x.cores:.0f} processors"
        ),
    ),
    Rule(
        "core",
        lambda x: x.core_busy >= _FULL_CORE and x.cpu_busy < _MANY_CORES and x.gpu_total_bytes > 0,
        lambda x: (
            f"one processor is {x.core_busy:.0%} busy, all together {x.cpu_busy:.0%}: a "
            "single thread may hold the GPU up. Do its work beforehand (`pretokenize`), or in "
            "`--num-workers`"
        ),
    ),
    Rule(
        "accumulation",
        lambda x: x.accumulation > 1 and x.whole_step_bytes <= _MOST_MEMORY * x.gpu_total_bytes,
        lambda x: (
            f"a step accumulates {x.accumulation:.0f} micro-batches, and a single one of "
            f"{x.step_tokens:,.0f} tokens would take about {x.whole_step_bytes / 1e9:.1f} of "
            f"{x.gpu_total_bytes / 1e9:.1f} GB: `--micro-batch-tokens {x.step_tokens:.0f}`"
        ),
    ),
    Rule(
        "memory free",
        lambda x: x.used < _LEAST_MEMORY,
        lambda x: (
            f"{x.memory} are in use, below 60 %: raise `--micro-batch-tokens`, and the step "
            "if it is a single micro-batch"
        ),
    ),
    Rule(
        "small model",
        lambda x: x.gpu_busy < _LEAST_BUSY and x.state_bytes < _SMALL_MODEL * x.gpu_total_bytes,
        lambda x: (
            f"the model takes {x.state_bytes / 1e9:.2f} of {x.gpu_total_bytes / 1e9:.1f} GB "
            f"({x.state_bytes / x.gpu_total_bytes:.1%}), and the GPU is {x.gpu_busy:.0%} busy: the "
            "model is too small for this GPU. Use larger micro-batches, `--compile`, a larger "
            "`--model` or a smaller GPU"
        ),
    ),
    Rule(
        "checkpoint",
        lambda x: x.checkpoint >= _LEAST_WRITING,
        lambda x: f"checkpoints take {x.checkpoint:.1%} of the time: raise `--save-every`",
    ),
    Rule(
        "log",
        lambda x: x.log >= _LEAST_WRITING,
        lambda x: f"progress lines take {x.log:.1%} of the time: raise `--log-every`",
    ),
)
"""The rules, the most urgent first."""


def recommended(readings: Readings) -> dict[str, str]:
    """Return the sentences of the rules that apply, by the rule's name."""
    return {rule.name: rule.sentence(readings) for rule in RULES if rule.applies(readings)}
