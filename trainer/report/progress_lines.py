"""The progress lines of a run, and the one place of the loop that waits for the device.

A line on the console and an object in metrics.jsonl are made from the same `StepLog`, so they
always agree. An unknown figure is null in the file and left out of the line.
"""

import dataclasses
import logging
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenfeed.trainer.optim.gradients import Tally
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.report.metrics_file import MetricsFile
from tokenfeed.trainer.sensors.gpu import GpuReading, device_uuid
from tokenfeed.trainer.sensors.host import HostReading
from tokenfeed.trainer.sensors.sampler import sample_machine
from tokenfeed.trainer.stall import StallMeter
from tokenfeed.trainer.stall.report import main_cause
from tokenfeed.trainer.stall.statistics import StepSeconds

__all__ = ["MOST_SKIPPED", "ProgressLog", "Skips", "StepLog"]

MOST_SKIPPED = 20
"""A run ends after this many steps in a row whose loss or gradients are not finite."""

_log = logging.getLogger(__name__)


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


class Skips(NamedTuple):
    """The skipped steps since the previous progress line."""

    first: int
    """The first one. If the run ends, the first one in a row."""
    in_a_row: int
    """Number of the latest steps that were all skipped."""


class ProgressLog:
    """Add up steps, and write a progress line now and then.

    Args:
        metrics: Receives each line as an object; None on ranks other than 0.
        stall: Its readings give speed and stall of the steps since the previous line.
        learner: Its learning rate and skipped steps are logged.
        device: Holds the sums. Its memory and utilization are logged.
        steps: Last step of the run.
        skipped: Number of steps that earlier sessions skipped.
    """

    def __init__(
        self,
        metrics: MetricsFile | None,
        stall: StallMeter[object],
        learner: Learner,
        device: torch.device,
        steps: int,
        skipped: int,
    ) -> None:
        self._metrics, self._stall, self._learner, self._steps = metrics, stall, learner, steps
        self._device, self._machine = device, sample_machine(device_uuid(device))
        self._interval, self._first_skipped = self._empty_interval()
        self._skipped = skipped
        self.is_behind = False
        """Whether steps were added since the last line."""
        self._reading = stall.read()

    def add(self, step: int, tally: Tally, norm: Tensor) -> None:
        """Add a step without waiting for the device.

        Args:
            step: Number of the step.
            tally: Sums of the step. A loss that is not finite does not count.
            norm: Norm of its gradient, not finite if the step was skipped.
        """
        is_finite = tally.loss.isfinite()
        self._interval.loss += torch.where(is_finite, tally.loss, 0.0)
        self._interval.targets += torch.where(is_finite, tally.targets, 0)
        is_first = ~norm.isfinite() & (self._first_skipped == 0)
        self._first_skipped = torch.where(is_first, step, self._first_skipped)
        self.is_behind = True

    def close(self) -> None:
        """End the thread of the sensors."""
        self._machine.close()

    def write(self, step: int, tokens: int, norm: Tensor) -> Skips | None:
        """Write a line. This waits for the device.

        Args:
            step: The latest step.
            tokens: Real tokens trained so far.
            norm: Norm of the latest step's gradient.

        Returns:
            The skipped steps since the previous line; None without any. If they end the run, no
            line is written.
        """
        latest_norm, skipped, in_a_row, total, targets, first = self._fetch(norm)
        self._interval, self._first_skipped = self._empty_interval()
        self.is_behind = False
        before, self._skipped = self._skipped, int(skipped)
        if in_a_row >= MOST_SKIPPED:
            return Skips(step - int(in_a_row) + 1, int(in_a_row))
        reading, machine = self._stall.read(), self._machine.latest
        window, self._reading = reading.since(self._reading), reading
        log = StepLog(
            step=step,
            loss=total / targets if targets else None,
            learning_rate=self._learner.rate(step),
            gradient_norm=latest_norm if math.isfinite(latest_norm) else None,
            skipped_steps=self._skipped - before,
            tokens=tokens,
            real_tokens_per_s=window.tokens_per_s if window.steps else None,
            stall=window.fraction if window.steps else None,
            stall_causes={name: part for name, part in window.cause_fractions.items() if part},
            step_seconds=self._stall.latest_steps(),
            gpu=machine.gpu if machine else None,
            host=machine.host if machine else None,
        )
        if self._metrics:
            self._metrics.write(log.as_dict())
        _log.info("%s", log.line(self._steps))
        return Skips(int(first), int(in_a_row)) if first else None

    def _empty_interval(self) -> tuple[Tally, Tensor]:
        """Return the sums of no step, and 0 for the first skipped step."""
        return Tally.zero(self._device), torch.zeros((), dtype=torch.int64, device=self._device)

    def _fetch(self, norm: Tensor) -> list[float]:
        """Fetch the latest norm, skipped steps, skipped steps in a row until now, summed loss and
        targets, and the first skipped step of the interval. Nothing else waits for the device."""
        skips, sums = self._learner.precision.skips, self._interval
        values = (norm, *skips, sums.loss, sums.targets, self._first_skipped)
        return torch.stack([value.double() for value in values]).tolist()
