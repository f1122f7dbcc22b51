"""The progress of a run: a line on the console and an object in metrics.jsonl.

Both are made from the same `StepLog`, so they always agree. An unknown figure is null in the file
and left out of the line.
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

__all__ = ["MetricsFile", "StepLog", "Tally"]


@dataclass(slots=True)
class Tally:
    """Sums over micro-batches. Sums that depend on the device stay on the device."""

    loss: Tensor
    targets: Tensor
    tokens: int = 0
    slots: int = 0

    @classmethod
    def zero(cls, device: torch.device) -> "Tally":
        """Return the sums of no micro-batch."""
        loss = torch.zeros((), device=device)
        return cls(loss, torch.zeros((), dtype=torch.int64, device=device))

    def add(self, loss: Loss, tokens: int, slots: int) -> None:
        """Add one micro-batch."""
        self.extend(Tally(loss.sum.detach(), loss.targets, tokens, slots))

    def extend(self, other: "Tally") -> None:
        """Add the sums of another tally."""
        self.loss += other.loss
        self.targets += other.targets
        self.tokens += other.tokens
        self.slots += other.slots


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLog:
    """The state of a run at a step. Rates cover the steps since the previous line."""

    step: int
    loss: float | None
    """Mean per target token, in nats, over the steps since the previous line with a finite loss;
    None without such a step."""
    learning_rate: float
    gradient_norm: float | None
    """Norm of this step, before clipping; None if it was not finite and the step was skipped."""
    skipped_steps: int
    """Steps since the previous line that changed nothing: their gradients were not finite."""
    tokens: int
    """Real tokens trained since the first step."""
    real_tokens_per_s: float | None
    """None during warm-up."""
    stall: float | None
    """Fraction of the wall time, 0 to 1; None during warm-up."""
    stall_causes: dict[str, float]
    """Share of the wall time by cause, without causes of 0."""
    step_seconds: StepSeconds | None
    """None during warm-up."""
    gpu: GpuReading | None
    host: HostReading | None

    def line(self, steps: int) -> str:
        """Return the line for the console. `steps` is the last step of the run."""
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
        """Return the object for metrics.jsonl. A missing loss is left out."""
        values = dataclasses.asdict(self)
        return values if self.loss is not None else {k: v for k, v in values.items() if k != "loss"}

    def _stall(self, stall: float) -> str:
        """The stall with its main cause: an evaluation must not look like a slow loader."""
        return f"stall {stall:.2%}{main_cause(self.stall_causes)}"


def _share(value: float | None) -> str:
    return "" if value is None else f" {value:.0%}"


class _Line(TypedDict):
    """The fields of a line that are read again."""

    step: int
    loss: NotRequired[float]
    validation_loss: NotRequired[float | None]
    skipped_steps: NotRequired[int]


class MetricsFile:
    """metrics.jsonl of a run. Each line is written at once.

    The open file locks the run's folder: a second run in the folder is refused.
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
        """Drop the lines after a step. A resumed run writes them again."""
        kept = [line for line in self.read() if line["step"] <= until_step]
        self._file.truncate(sum(map(len, self._lines()[: len(kept)])))

    def write(self, values: dict[str, Any]) -> None:
        """Append a line. `values` has at least `step`."""
        line = encode_json(values).encode() + b"\n"
        if self._file.write(line) < len(line):  # the last bytes that the disk had
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        for listen in self._followers:
            listen(values)

    def follow(self, listen: Callable[[dict[str, Any]], None]) -> None:
        """Call `listen` with each line written from now on. It must not raise."""
        self._followers.append(listen)

    def evaluation(self, step: int, split: str) -> dict[str, float]:
        """Return the metrics of a split at a step by name; empty if there are none."""
        return {
            key.removeprefix(f"{split}_"): value
            for line in self.read()
            if line["step"] == step
            for key, value in line.items()
            if key.startswith(f"{split}_")
        }

    def read(self) -> list[dict[str, Any]]:
        """Return all whole lines. A killed run may have cut the last one short; it is left out.

        Raises:
            ResumeError: A line is not a metrics record.
        """
        return [self._parse(number, line) for number, line in enumerate(self._lines(), 1)]

    def close(self) -> None:
        """Close the file, which unlocks the folder."""
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
                f"{self._path}: line {number} is not a metrics record ({error}). Delete that line."
            ) from error
        return values
