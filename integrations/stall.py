"""What the stall callbacks of trainers share: somebody else's loop, seen from its events.

A trainer that owns its loop leaves no place for brackets. Its events come in order, though: what
lies between the end of a step and the beginning of the next is the wait for data, but for what
other events claim of it.
"""

import contextlib
from pathlib import Path
from typing import Any

from tokenfeed.trainer.stall import Cause, StallMeter, StallReport

__all__ = ["MeterOfEvents"]


class MeterOfEvents:
    """A stall meter that is told of events.

    Args:
        settings: Of the `StallMeter`, which is made when training begins: its device is known then.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._meter: StallMeter[Any] | None = None
        self._between = contextlib.ExitStack()
        self._is_between = False

    def begin(self, device: Any) -> None:
        """Training begins, and waits for its first batch."""
        self._meter = StallMeter(**{"device": device} | self._settings)
        self.wait()

    def wait(self) -> None:
        """A batch has been trained on, the next is waited for."""
        if self._meter is not None and not self._is_between:
            self._between.enter_context(self._meter.cause("data"))
            self._is_between = True

    def train(self) -> None:
        """The batch is there."""
        self._between.close()
        self._is_between = False

    def step(self, tokens: int = 0) -> None:
        """A step has been queued."""
        if self._meter is not None:
            self._meter.step(tokens)
            self.wait()

    def claim(self, cause: Cause) -> None:
        """What happened since the event before was this, and no wait for data."""
        if self._meter is not None and self._is_between:
            self._meter.charge(cause)

    def bracket(self, cause: Cause) -> contextlib.AbstractContextManager[None]:
        """What happens inside is this."""
        return contextlib.nullcontext() if self._meter is None else self._meter.cause(cause)

    def end(self, folder: Path | None = None) -> StallReport | None:
        """Training is over: the report, also in a folder; None where it never began."""
        if self._meter is None:
            return None
        self.train()
        report = self._meter.report()
        self._meter.close()
        if folder is not None:
            report.write(folder)
        return report
