"""The chain of marks in the device's queue. Two neighbouring marks enclose a segment.

Appending a mark costs next to nothing. A segment is added to the accounts once the device has
passed its marks. Nothing here waits for the device. `Timeline` keeps the latest segments for
trace.json, which Perfetto and Chrome open.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.trainer.config.run_config import TRACE_FILE
from tokenfeed.trainer.stall.accounts import Accounts, StepEnd
from tokenfeed.trainer.stall.causes import Phase
from tokenfeed.trainer.stall.device import Clock, Moment

_MOST = 20_000
_DEVICE, _STEPS = 1, 2
_TRACKS = {_DEVICE: "device: work, and what it waited for", _STEPS: "steps"}


class Timeline:
    """Keeps the latest segments, in some megabytes."""

    def __init__(self) -> None:
        self._segments: deque[tuple[str, float, float]] = deque(maxlen=_MOST)
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=_MOST)
        self._step_started = 0.0

    def add(self, phase: Phase, start_s: float, end_s: float) -> None:
        """Add a segment of device time. Segments come in order, without gaps."""
        if end_s > start_s:
            self._segments.append((phase, start_s, end_s))

    def end_step(self, tokens: int, end_s: float) -> None:
        """Add a step that ended with the latest segment. `tokens` counts real tokens."""
        self._steps.append((tokens, self._step_started, end_s))
        self._step_started = end_s

    def write(self, folder: Path) -> Path:
        """Write trace.json into a folder, atomically."""
        steps = ((f"{tokens:,} tokens", start, end) for tokens, start, end in self._steps)
        events = [*_names(), *_events(_DEVICE, self._segments), *_events(_STEPS, steps)]
        content = {"traceEvents": events, "displayTimeUnit": "ms"}
        path = folder / TRACE_FILE
        atomic_write(path, json.dumps(content).encode())
        return path


def _names() -> Iterator[dict[str, Any]]:
    for track, name in _TRACKS.items():
        yield {
            "name": "thread_name",
            "ph": "M",
            "pid": 1,
            "tid": track,
            "args": {"name": name},
        }


def _events(track: int, kept: Iterable[tuple[str, float, float]]) -> Iterator[dict[str, Any]]:
    """Yield complete events of Chrome's trace format. Times are in microseconds."""
    for name, start_s, end_s in kept:
        yield {
            "name": name,
            "ph": "X",
            "pid": 1,
            "tid": track,
            "ts": round(start_s * 1e6, 3),
            "dur": round((end_s - start_s) * 1e6, 3),
        }


_LINKS_AT_ONCE = 256
"""Number of segments to resolve together. A tight loop runs several times faster than the same code
run once after each step, because a step evicts this code's data from the CPU caches."""

_Link = tuple[tuple[Any, float, float], Phase, StepEnd | None, bool]
"""A mark with the host time before and after it, the phase of the segment that it ends, the step
that it ends, and whether it is inside the work. A tuple, since one is made at each mark."""


class MarkChain:
    """The marks since the first one. Not safe for threads, nor for callbacks during `resolve`."""

    def __init__(self, clock: Clock, accounts: Accounts, timeline: Timeline) -> None:
        self._clock, self._accounts, self._timeline = clock, accounts, timeline
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
        links, clock, add, draw = self._links, self._clock, self._accounts.add, self._timeline.add
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
            draw(phase, last.device, moment.device)
            last_mark, last = mark, moment
            if is_inside:
                self._accounts.mark()
            if end is not None:
                self._accounts.end_step(end)
                self._timeline.end_step(end.tokens, moment.device)
        if links:
            self._not_passed_at = polled_at
        self._last_mark, self._last = last_mark, last
