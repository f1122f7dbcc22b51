"""The progress lines of a run, and the one place of the loop that waits for the device."""

import dataclasses
import logging
import math

import torch
from torch import Tensor

from tokenfeed.trainer.learner import Learner
from tokenfeed.trainer.precision import device_uuid
from tokenfeed.trainer.sensors.machine import sample_machine
from tokenfeed.trainer.stall import StallMeter
from tokenfeed.trainer.telemetry import MetricsFile, StepLog, Tally

__all__ = ["ProgressLog"]

MOST_SKIPPED = 20
"""So many steps in a row without finite gradients end a run: nothing has been learnt since."""

_log = logging.getLogger(__name__)


class ProgressLog:
    """Adds up steps, and says now and then how they went.

    Args:
        metrics: Gets each line as an object.
        stall: Its readings give speed and stall of the steps since the line before.
        learner: Its learning rate and skipped steps are told.
        device: Where the sums are kept, and whose memory and use are told.
        steps: Where the run ends.
        skipped: Steps that earlier sessions skipped.
    """

    def __init__(
        self,
        metrics: MetricsFile,
        stall: StallMeter[object],
        learner: Learner,
        device: torch.device,
        steps: int,
        skipped: int,
    ) -> None:
        self._metrics, self._stall, self._learner, self._steps = metrics, stall, learner, steps
        self._device, self._machine = device, sample_machine(device_uuid(device))
        self._machine.start()
        self._interval = Tally.zero(device)
        self._skipped = skipped
        self.is_behind = False
        """Whether steps were added since the last line."""
        self._reading = stall.read()

    def add(self, tally: Tally) -> None:
        """Add a step."""
        self._interval.extend(tally)
        self.is_behind = True

    def close(self) -> None:
        """End the thread that reads the machine."""
        self._machine.close()

    def write(self, step: int, tokens: int, norm: Tensor) -> str | None:
        """Write a line; this waits for the device.

        Args:
            step: The latest one.
            tokens: Real tokens trained so far.
            norm: Of the latest step's gradient.

        Returns:
            Why the run has diverged, and nothing is written; None where it has not.
        """
        interval, self._interval = self._interval, Tally.zero(self._device)
        self.is_behind = False
        latest_norm, skipped, in_a_row, total, targets = self._fetch(interval, norm)
        before, self._skipped = self._skipped, int(skipped)
        loss = total / max(1.0, targets)
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if in_a_row >= MOST_SKIPPED:
            return f"gradients are not finite, {in_a_row:.0f} steps in a row,"
        reading, machine = self._stall.read(), self._machine.latest
        window, self._reading = reading.since(self._reading), reading
        log = StepLog(
            step=step,
            loss=loss,
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
        self._metrics.write(dataclasses.asdict(log))
        _log.info("%s", log.line(self._steps))
        return None

    def _fetch(self, tally: Tally, norm: Tensor) -> list[float]:
        """Latest norm, skipped steps, skipped steps in a row until now, summed loss and targets.
        This is the only wait for the device."""
        values = (norm, *self._learner.precision.skips, tally.loss, tally.targets)
        return torch.stack([value.double() for value in values]).tolist()
