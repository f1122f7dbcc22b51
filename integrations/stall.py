"""A stall meter for training loops of other libraries, driven by their callback events.

The events of such a loop come in a known order. The time between the end of a step and the start of
the next step counts as waiting for data, except the time of other events.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenfeed.trainer.stall import Cause, StallMeter, StallReport

_log = logging.getLogger(__name__)


class MeterOfEvents:
    """A stall meter that is driven by events.

    Args:
        settings: Settings of the `StallMeter`, which is made when training begins, because its
            device is known then.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._meter: StallMeter | None = None
        self._between, self._charged = contextlib.ExitStack(), contextlib.ExitStack()
        self._is_between = False
        self._tokens = self._slots = 0

    def begin(self, device: Any) -> None:
        """Start measuring: training waits for its first batch."""
        self._close()  # after a training that an exception ended
        self._meter = StallMeter(**{"device": device} | self._settings)
        self._tokens = self._slots = 0
        self.wait()

    def wait(self) -> None:
        """Training on a batch has been queued. The loop waits for the next batch."""
        if self._meter is not None and not self._is_between:
            self._between.enter_context(self._meter.cause("data"))
            self._is_between = True

    def train(self) -> None:
        """The batch is ready."""
        self._between.close()
        self._is_between = False

    def count(self, tokens: int, slots: int) -> None:
        """Add real tokens, and token slots including padding, to the present step."""
        self._tokens += tokens
        self._slots += slots

    def step(self, tokens: int = 0) -> None:
        """A step has been queued, with further tokens."""
        tokens += self._tokens
        if self._meter is not None:
            self._meter.step(tokens, max(tokens, self._slots))
            self._tokens = self._slots = 0
            self.wait()

    def claim(self, cause: Cause) -> None:
        """Charge the time since the previous event to `cause` instead of data."""
        if self._meter is not None and self._is_between:
            self._meter.charge(cause)

    def cause(self, name: Cause) -> contextlib.AbstractContextManager[None]:
        """Charge the time inside the block to a cause."""
        return contextlib.nullcontext() if self._meter is None else self._meter.cause(name)

    def charge_calls(
        self,
        owner: Any,
        name: str,
        cause: Cause,
        unless: Callable[..., bool] = lambda *_, **__: False,
    ) -> None:
        """Charge calls of the method `owner.name` to a cause, until measuring ends.

        Args:
            owner: An object or a class.
            name: Name of the method.
            cause: The cause.
            unless: Returns whether a call is not charged, from the arguments of the call.
        """
        method = getattr(owner, name)

        def charged(*args: Any, **settings: Any) -> Any:
            if unless(*args, **settings):
                return method(*args, **settings)
            with self.cause(cause):
                return method(*args, **settings)

        setattr(owner, name, charged)
        self._charged.callback(setattr, owner, name, method)

    def end(
        self, folder: Path | str | None = None, *, is_first: bool = True, has_failed: bool = False
    ) -> StallReport | None:
        """Stop measuring.

        Args:
            folder: Where to write the report. None: nowhere.
            is_first: Whether this rank logs the report.
            has_failed: Whether an exception ended the training. Otherwise the readings of all ranks
                are gathered, so every rank has to call this.

        Returns:
            The report, or None if training never began.
        """
        if self._meter is None:
            return None
        self.train()
        if not has_failed:
            with _survived("the readings of other ranks are missing"):
                self._meter.gather()
        report = self._meter.report()
        self._close()
        if folder is not None:
            with _survived(f"the report cannot be written into {folder}"):
                report.write(folder)
        if is_first:
            _log.info("%s", report)
        return report

    def _close(self) -> None:
        self.train()
        self._charged.close()
        if self._meter is not None:
            self._meter.close()
            self._meter = None


@contextlib.contextmanager
def _survived(loss: str) -> Iterator[None]:
    """Log an error instead of raising it: no training fails by its meter."""
    try:
        yield
    except Exception as error:
        _log.warning("stall: %s (%s)", loss, error)
