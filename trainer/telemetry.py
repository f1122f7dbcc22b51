"""What a run says while it runs: one line on the console, one JSON object in metrics.jsonl.

Both come from the same `StepLog`, so that they cannot disagree. A figure that is not known is null
in the file and left out of the line.
"""

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec
import torch
from torch import Tensor

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.locking import hold
from tokenfeed.trainer.config import METRICS_FILE
from tokenfeed.trainer.report import encode_json
from tokenfeed.trainer.sensors.gpu import GpuReading
from tokenfeed.trainer.sensors.host import HostReading
from tokenfeed.trainer.stall.step_times import StepSeconds
from tokenfeed.trainer.stall.table import main_cause
from tokenfeed.trainer.tasks.task import Loss

__all__ = ["MetricsFile", "NoMetrics", "StepLog", "Tally"]


@dataclass(slots=True)
class Tally:
    """Sums over micro-batches; what only the device knows stays there."""

    loss: Tensor
    targets: Tensor
    tokens: int = 0
    slots: int = 0

    @classmethod
    def zero(cls, device: torch.device) -> "Tally":
        """Of nothing yet."""
        loss = torch.zeros((), device=device)
        return cls(loss, torch.zeros((), dtype=torch.int64, device=device))

    def add(self, loss: Loss, tokens: int, slots: int) -> None:
        """Add one micro-batch."""
        self.extend(Tally(loss.sum.detach(), loss.targets, tokens, slots))

    def extend(self, other: "Tally") -> None:
        """Add the sums of another."""
        self.loss += other.loss
        self.targets += other.targets
        self.tokens += other.tokens
        self.slots += other.slots


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLog:
    """The state of a run at a step; rates are those of the steps since the line before."""

    step: int
    loss: float | None
    """Mean per target token, in nats, over the steps since the line before whose loss was finite;
    None without any."""
    learning_rate: float
    gradient_norm: float | None
    """Of this step, before clipping; None where it was not finite and the step was skipped."""
    skipped_steps: int
    """Steps since the line before that changed nothing: their gradients were not finite."""
    tokens: int
    """Real tokens trained since the first step."""
    real_tokens_per_s: float | None
    """None during warm-up."""
    stall: float | None
    """Fraction of the wall time, 0 to 1; None during warm-up."""
    stall_causes: dict[str, float]
    """The causes of it that are not 0."""
    step_seconds: StepSeconds | None
    """None during warm-up."""
    gpu: GpuReading | None
    host: HostReading | None

    def line(self, steps: int) -> str:
        """For the console; `steps` is where the run ends."""
        parts = [
            f"step {self.step:>{len(str(steps))}}/{steps}",
            "loss not finite" if self.loss is None else f"loss {self.loss:.4f}",
            f"lr {self.learning_rate:.2e}",
        ]
        if self.real_tokens_per_s is not None and self.stall is not None:
            parts += [f"{self.real_tokens_per_s:,.0f} real tok/s", self._stall(self.stall)]
        else:
            parts.append("warming up")
        if self.gpu is not None and self.gpu.memory_bytes is not None:
            parts.append(f"gpu {self.gpu.memory_bytes / 1e9:.1f} GB{_share(self.gpu.utilization)}")
        if self.skipped_steps:
            parts.append(f"{self.skipped_steps} skipped")
        return " | ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """For metrics.jsonl, where a loss is a number."""
        values = dataclasses.asdict(self)
        return values if self.loss is not None else {k: v for k, v in values.items() if k != "loss"}

    def _stall(self, stall: float) -> str:
        """With its main cause: an evaluation between two lines must not pass for the loader."""
        return f"stall {stall:.2%}{main_cause(self.stall_causes)}"


def _share(value: float | None) -> str:
    return "" if value is None else f" {value:.0%}"


class _Line(TypedDict):
    """What is read again of a line."""

    step: int
    loss: NotRequired[float]
    validation_loss: NotRequired[float | None]
    skipped_steps: NotRequired[int]


class MetricsFile:
    """metrics.jsonl of a run: appended line by line, each written at once.

    Who has it open holds the run's folder: a second run that opens it is refused.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / METRICS_FILE
        self._followers: list[Callable[[dict[str, Any]], None]] = []
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
        if not hold(self._file):
            self.close()
            raise ConfigError(
                f"`--run-dir`: another run is writing into {run_dir}. Wait for it or end it, or "
                "give another folder."
            )

    def keep(self, until_step: int) -> None:
        """Drop the lines after a step, which are about to be written again."""
        kept = [line for line in self.read() if line["step"] <= until_step]
        self._file.truncate(sum(map(len, self._lines()[: len(kept)])))

    def write(self, values: dict[str, Any]) -> None:
        """Append a line; it holds at least `step`."""
        line = encode_json(values).encode() + b"\n"
        if self._file.write(line) < len(line):  # the last bytes that the disk had
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        for listen in self._followers:
            listen(values)

    def follow(self, listen: Callable[[dict[str, Any]], None]) -> None:
        """From now on call this with every line that was written; it must not fail."""
        self._followers.append(listen)

    def values(self, key: str) -> list[Any]:
        """All values of `key` so far, in order; None for one that was not finite."""
        return [line[key] for line in self.read() if key in line]

    def evaluation(self, step: int, split: str) -> dict[str, float]:
        """The metrics of a split at a step, by name; empty if there are none."""
        return {
            key.removeprefix(f"{split}_"): value
            for line in self.read()
            if line["step"] == step
            for key, value in line.items()
            if key.startswith(f"{split}_")
        }

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; the last may be cut short where a run was killed.

        Raises:
            ResumeError: One is no line of ours.
        """
        return [self._parse(number, line) for number, line in enumerate(self._lines(), 1)]

    def close(self) -> None:
        """Close the file, and let go of the folder."""
        self._file.close()

    def _lines(self) -> list[bytes]:
        content = self._path.read_bytes()
        return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            values: dict[str, Any] = json.loads(line)
            msgspec.convert(values, _Line)
        except ValueError as error:
            raise ResumeError(
                f"{self._path}: line {number} is none of a run ({error}). Delete that line."
            ) from error
        return values


class NoMetrics(MetricsFile):
    """What the ranks have that write nothing."""

    def __init__(self) -> None:
        pass

    def keep(self, until_step: int) -> None:
        """Nothing is there."""

    def write(self, values: dict[str, Any]) -> None:
        """Rank 0 does."""

    def read(self) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def close(self) -> None:
        """Nothing is open."""
