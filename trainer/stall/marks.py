"""The chain of marks in the device's queue. Two neighbouring marks enclose a segment.

Appending a mark costs next to nothing. A segment is added to the accounts once the device has
passed its marks. Nothing here waits for the device.
"""

from collections import deque
from typing import Any

from tokenfeed.trainer.stall.accounts import Accounts, StepEnd
from tokenfeed.trainer.stall.causes import Phase
from tokenfeed.trainer.stall.device import Clock, Moment

_LINKS_AT_ONCE = 256
"""Number of segments to resolve together. A tight loop runs several times faster than the same code
run once after each step, because a step evicts this code's data from the CPU caches."""

_Link = tuple[tuple[Any, float, float], Phase, StepEnd | None, bool]
"""A mark with the host time before and after it, the phase of the segment that it ends, the step
that it ends, and whether it is inside the work. A tuple, since one is made at each mark."""


class MarkChain:
    """The marks since the first one. Not safe for threads, nor for callbacks during `resolve`."""

    def __init__(self, clock: Clock, accounts: Accounts) -> None:
        self._clock, self._accounts = clock, accounts
        self._links: deque[_Link] = deque()
        self.append = self._links.append
        """Appends a mark that was just queued."""
        self._last_mark: Any
        self._last_mark, before, after = clock.mark()
        self._last = Moment(0.0, before, after, after - before)
        self._device = 0.0
        self._not_passed_at = before
        """The latest host time at which the device had not passed the first of these marks."""

    @property
    def is_long(self) -> bool:
        """Whether enough segments wait to be resolved together."""
        return len(self._links) >= _LINKS_AT_ONCE

    def resolve(self) -> None:
        """Add segments whose marks the device has passed to the accounts."""
        links, clock, add = self._links, self._clock, self._accounts.add
        last_mark, last, polled_at = self._last_mark, self._last, clock.now()
        while links and clock.passed(links[0][0][0]):
            (mark, before, after), phase, end, is_inside = links.popleft()
            self._device += clock.seconds(last_mark, mark)
            clock.recycle(last_mark)
            # Marks on two streams may pass out of order. Device time then stays at the later value.
            device = max(last.device, self._device)
            earliest = max(before, self._not_passed_at)
            moment = Moment(device, earliest, after, after - before)
            add(phase, last, moment)
            last_mark, last = mark, moment
            if is_inside:
                self._accounts.mark()
            if end is not None:
                self._accounts.end_step(end)
        if links:
            self._not_passed_at = polled_at
        self._last_mark, self._last = last_mark, last
