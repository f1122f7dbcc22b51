"""The progress lines of a run, and the one place of the loop that waits for the device."""

import logging
import math
from typing import NamedTuple

import torch
from torch import Tensor

from tokenfeed.trainer.learner import Learner
from tokenfeed.trainer.precision import device_uuid
from tokenfeed.trainer.sensors.machine import sample_machine
from tokenfeed.trainer.stall import StallMeter
from tokenfeed.trainer.telemetry import MetricsFile, StepLog, Tally

__all__ = ["MOST_SKIPPED", "ProgressLog", "Skips"]

MOST_SKIPPED = 20
"""A run ends after this many steps in a row whose loss or gradients are not finite."""

_log = logging.getLogger(__name__)


class Skips(NamedTuple):
    """The skipped steps since the progress line before."""

    first: int
    """The first of them; where the run ends, the first of those in a row."""
    in_a_row: int
    """How many of the latest steps were skipped without a break."""


class ProgressLog:
    """Add up steps, and write a progress line now and then.

    Args:
        metrics: Receives each line as an object; None on ranks other than 0.
        stall: Its readings give speed and stall of the steps since the previous line.
        learner: Its learning rate and skipped steps are logged.
        device: Holds the sums. Its memory and utilization are logged.
        steps: Last step of the run.
        skipped: Steps that earlier sessions skipped.
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
        self._machine.start()
        self._interval, self._first_skipped = self._empty_interval()
        self._skipped = skipped
        self.is_behind = False
        """Whether steps were added since the last line."""
        self._reading = stall.read()

    def add(self, step: int, tally: Tally, norm: Tensor) -> None:
        """Add a step, without a wait for the device.

        Args:
            step: Its number.
            tally: Its sums. A loss that is not finite does not count.
            norm: Its gradient's norm; not finite where the step was skipped.
        """
        is_finite = tally.loss.isfinite()
        self._interval.loss += torch.where(is_finite, tally.loss, 0.0)
        self._interval.targets += torch.where(is_finite, tally.targets, 0)
        is_first = ~norm.isfinite() & (self._first_skipped == 0)
        self._first_skipped = torch.where(is_first, step, self._first_skipped)
        self.is_behind = True

    def close(self) -> None:
        """End the thread that reads the machine."""
        self._machine.close()

    def write(self, step: int, tokens: int, norm: Tensor) -> Skips | None:
        """Write a line; this waits for the device.

        Args:
            step: The latest one.
            tokens: Real tokens trained so far.
            norm: Of the latest step's gradient.

        Returns:
            The skipped steps since the line before; None without any. Where they end the run, no
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
        """The sums of no step, and 0 for the first one that was skipped."""
        return Tally.zero(self._device), torch.zeros((), dtype=torch.int64, device=self._device)

    def _fetch(self, norm: Tensor) -> list[float]:
        """Latest norm, skipped steps, skipped steps in a row until now, summed loss and targets,
        first skipped step of the interval. This is the only wait for the device."""
        skips, sums = self._learner.precision.skips, self._interval
        values = (norm, *skips, sums.loss, sums.targets, self._first_skipped)
        return torch.stack([value.double() for value in values]).tolist()
