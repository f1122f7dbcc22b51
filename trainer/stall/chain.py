"""The chain of marks in the device's queue: neighbours are the ends of segments.

A mark is appended while the host runs, and costs next to nothing. A segment is added up once the
device has passed its marks; nothing here waits for that.
"""

from collections import deque
from typing import Any

from tokenfeed.trainer.stall.causes import Phase
from tokenfeed.trainer.stall.clock import Clock, Moment
from tokenfeed.trainer.stall.ledger import Ledger, StepEnd
from tokenfeed.trainer.stall.timeline import Timeline

__all__ = ["Chain"]

_LINKS_AT_ONCE = 256
"""So many segments are added up together: code that runs again at once runs several times faster
than after a step has filled the caches with its own."""

_Link = tuple[tuple[Any, float, float], Phase, StepEnd | None, bool]
"""The mark that ends a segment, host time before and after it, what the segment is; the step that
ends here, and whether it is a mark inside the work. Nothing dearer: one is made at each mark."""


class Chain:
    """From a first mark on; not for two threads at once, nor for a callback in between."""

    def __init__(self, clock: Clock[Any], ledger: Ledger, timeline: Timeline) -> None:
        self._clock, self._ledger, self._timeline = clock, ledger, timeline
        self._links: deque[_Link] = deque()
        self.append = self._links.append
        """A mark that was just queued."""
        self._last_mark: Any
        self._last_mark, before, after = clock.mark()
        self._last = Moment(0.0, before, after, after - before)
        self._device = 0.0
        self._not_passed_at = before
        """The latest host time at which the device had not passed the first of the links."""

    @property
    def is_long(self) -> bool:
        """Whether there is enough to be added up together."""
        return len(self._links) >= _LINKS_AT_ONCE

    def add_up(self) -> None:
        """Add up the segments whose marks have passed."""
        links, clock, add, draw = self._links, self._clock, self._ledger.add, self._timeline.add
        last_mark, last, asked = self._last_mark, self._last, clock.now()
        while links and clock.passed(links[0][0][0]):
            (mark, before, after), phase, end, is_inside = links.popleft()
            self._device += clock.seconds(last_mark, mark)
            clock.recycle(last_mark)
            # Marks on two streams may pass in another order: time stands still until it is past.
            device = max(last.device, self._device)
            earliest = max(before, self._not_passed_at)
            moment = Moment(device, earliest, after, after - before)
            add(phase, last, moment)
            draw(phase, last.device, moment.device)
            last_mark, last = mark, moment
            if is_inside:
                self._ledger.mark()
            if end is not None:
                self._ledger.end_step(end)
                self._timeline.end_step(end.tokens, moment.device)
        if links:
            self._not_passed_at = asked
        self._last_mark, self._last = last_mark, last
