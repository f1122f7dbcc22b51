"""Marks in a device's queue: the clocks that measure between them, and the chain of marks.

A mark ends a segment. Segments are work, or gaps: time in a bracket, in which no training work was
queued. Two neighbouring marks of a gap enclose nothing but idle time, so gaps are exact.

Work may contain idle time. After a mark, the chain queries the mark before it. If the device has
not passed that mark yet, all of the segment was queued before the device began it. So the host was
late nowhere in the segment. This holds for any order of a loop, and for any name of a bracket.
"""

import platform
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenfeed.trainer.stall.causes import Cause
from tokenfeed.trainer.stall.idle import UNUSUAL, Step

if TYPE_CHECKING:
    import torch

    from tokenfeed.trainer.stall.traces import Tracer

Phase = str
"""The activity between two marks: a cause, `work`, `before`, `since`, `maybe` or `tracer`. `before`
is the time on a CPU from the end of a step to the first forward pass. `since` is such time, but
work since a moment. `maybe` belongs to an evaluation that follows, or else to data. `tracer`
belongs to nobody."""

End = tuple[int, float, int, int, bool, Cause | None]
"""What ends a step: its number, size, tokens and slots, whether it is usable, and what to blame."""


class Clock:
    """Queues marks among a device's work, and measures the time between them.

    This is the clock of a CPU: the host does the work itself, so host time is device time.
    Subclasses are clocks of devices that work beside the host. Marks are of any type.
    """

    method = (
        "stall on a CPU is the time that the training thread spends outside of its steps, by the "
        "host's clock"
    )
    """One sentence for the report: what is measured, and how."""
    is_beside_host = False
    """Whether the device works in parallel with the host."""
    name = f"CPU, {platform.machine()}"
    """The product name of the device."""

    def mark(self) -> Any:
        """Queue a mark behind all work queued so far."""
        return time.perf_counter()

    def passed(self, mark: Any) -> bool:
        """Return whether the device has reached the mark. Never waits."""
        return True

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the device time between two neighbouring marks that it has passed."""
        return float(later - earlier)

    def recycle(self, mark: Any) -> None:
        """Take back a mark that is no longer used."""

    def takes_marks(self) -> bool:
        """Return whether a mark may be queued now, at any place of the program."""
        return True

    def now(self) -> float:
        """Return the host time."""
        return time.perf_counter()

    def tracer(self) -> "Tracer | None":
        """Return the tracer of the device; None if it has none."""
        return None

    def memory_statistics(self) -> dict[str, Any] | None:
        """Return the statistics of torch's allocator for the device; None without one."""
        return None


class EventClock(Clock):
    """The clock of a GPU. Events are pooled, and polled with `query`; nothing waits for them.

    An elapsed time is a 32-bit float of milliseconds. Only short times are exact to microseconds,
    so times are read between neighbouring events.
    """

    method = (
        "GPU events: between events around code that queues no work of the training, all time is "
        "idle; inside the work, idle time is the time of the steps minus the time of their kernels "
        "in short traces"
    )
    is_beside_host = True

    def __init__(self, device: "torch.device") -> None:
        from tokenfeed.pipeline.feeding.devices import cuda

        self._device = device
        """The device of the events. Loops may use several devices and switch the current one."""
        self._cuda = cuda
        self.name = cuda.get_device_name(device)
        self._new_event = partial(cuda.Event, enable_timing=True)
        self._pool: list[torch.Event] = []

    def mark(self) -> "torch.Event":
        """Record an event on the device's current stream."""
        event = self._pool.pop() if self._pool else self._new_event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def passed(self, mark: "torch.Event") -> bool:
        """Return whether the event has occurred."""
        return bool(mark.query())

    def seconds(self, earlier: "torch.Event", later: "torch.Event") -> float:
        """Return the GPU time between two events."""
        return float(earlier.elapsed_time(later)) / 1e3

    def recycle(self, mark: "torch.Event") -> None:
        """Keep the event for a later mark."""
        self._pool.append(mark)

    def takes_marks(self) -> bool:
        """Return False while a CUDA graph is captured: the event would become a part of the
        graph."""
        with self._cuda.device(self._device):
            return not self._cuda.is_current_stream_capturing()

    def tracer(self) -> "Tracer":
        """Return a tracer of the device's kernels."""
        from tokenfeed.trainer.stall.kineto import KinetoTracer

        return KinetoTracer(self._device)

    def memory_statistics(self) -> dict[str, Any] | None:
        """Return the statistics of torch's allocator for the GPU."""
        statistics: dict[str, Any] = self._cuda.memory_stats_as_nested_dict(self._device)
        return statistics


def _adder(links: deque[tuple[Any, float, Phase, bool, End | None]]) -> Callable[..., float]:
    """Return `MarkChain.add` of a CPU: it runs several times in a step, with cold caches."""
    append, now = links.append, time.perf_counter

    def add(phase: Phase, end: End | None = None) -> float:
        mark = now()
        append((mark, mark, phase, False, end))
        return mark

    return add


_LATE_SECONDS = 50e-6
"""If a gap is longer than its bracket by more than this, the rest was a copy. It is about the time
between two launches of kernels."""


class MarkChain:
    """The chain of marks in the device's queue. Two neighbouring marks enclose a segment.

    A step is complete once the device has passed its last mark. The collector may interrupt any
    method here, and add marks of its own. Not safe for threads.

    Args:
        clock: The clock of the device.
        done: Takes each step that is complete.
    """

    def __init__(self, clock: Clock, done: Callable[[Step], object]) -> None:
        self._clock, self._done = clock, done
        is_host = type(clock) is Clock  # then a mark is a single call of C
        self._mark = time.perf_counter if is_host else clock.mark
        self._passed, self.now = clock.passed, clock.now
        self._is_beside_host = clock.is_beside_host
        self._links: deque[tuple[Any, float, Phase, bool, End | None]] = deque()
        """Each mark, the host time, the phase of its segment, whether the segment is proven ahead,
        and the step that it ends."""
        self.add = _adder(self._links) if is_host else self._add
        """End a segment of a phase with a mark; perhaps it ends a step. Return the host time."""
        self._queued = self._resolved = self._mark()
        self._resolved_at = self.now()
        self._rates = deque[float](maxlen=16)
        """Seconds of work by size, of the latest steps."""
        self._device = self._latest = 0.0
        """Device time of the latest resolved mark, and the latest of all."""
        self._open()

    def _add(self, phase: Phase, end: End | None = None) -> float:
        mark = self._mark()
        is_ahead, at = self._is_beside_host and not self._passed(self._queued), self.now()
        self._links.append((mark, at, phase, is_ahead, end))
        self._queued = mark
        return at

    def add_work(self, began: float) -> None:
        """End a segment of `before`, which was work since a moment, with no forward pass yet."""
        self._links.append((self._mark(), began, "since", False, None))

    def is_queue_empty(self) -> bool:
        """Return whether the device has passed the latest mark."""
        return self._passed(self._queued)

    def resolve(self) -> None:
        """Complete the steps whose marks the device has passed."""
        links, clock = self._links, self._clock
        while links and clock.passed(links[0][0]):
            mark, at, phase, is_ahead, end = links.popleft()
            self._device += clock.seconds(self._resolved, mark)
            # Marks on two streams may pass out of order. Device time then stays at the later value.
            seconds = max(0.0, self._device - self._latest)
            self._latest += seconds
            clock.recycle(self._resolved)
            self._marks += 1
            if phase == "work":
                self._work += seconds
                self._ahead += seconds * is_ahead
            elif phase == "before":
                self._before += seconds
            elif phase == "since":
                work = min(seconds, mark - at)
                self._work += work
                self._before += seconds - work
            elif phase != "tracer":
                late = seconds - (at - self._resolved_at)
                if phase == "data" and self._is_beside_host and late > _LATE_SECONDS:
                    self._gaps["copy"] = self._gaps.get("copy", 0.0) + late
                    seconds -= late
                if phase in ("data", "evaluation"):
                    seconds += self._gaps.pop("maybe", 0.0)
                self._gaps[phase] = self._gaps.get(phase, 0.0) + seconds
            self._resolved, self._resolved_at = mark, at
            if end is not None:
                number, size, tokens, slots, is_usable, blamed = end
                step = Step(
                    number, size, tokens=tokens, slots=slots, is_usable=is_usable, blamed=blamed
                )
                self._complete(step, is_seen=phase != "before")

    def _open(self) -> None:
        self._work = self._ahead = self._before = 0.0
        self._marks, self._gaps = 0, dict[str, float]()

    def _complete(self, step: Step, *, is_seen: bool) -> None:
        """Fill in a step. `is_seen`: a forward pass ended the time `before`."""
        if maybe := self._gaps.pop("maybe", 0.0):
            self._gaps["data"] = self._gaps.get("data", 0.0) + maybe
        if self._is_beside_host:
            self._blame(step)
        else:  # the host itself does the work
            if not is_seen:
                self._work += self._before
            elif self._before:
                self._gaps["other"] = self._gaps.get("other", 0.0) + self._before
            self._ahead = self._work
        step.work, step.ahead, step.gaps = self._work, self._ahead, self._gaps
        step.marks, step.is_seen = self._marks, is_seen
        self._open()
        self._done(step)

    def _blame(self, step: Step) -> None:
        """Charge what a step takes longer than usual to an event that stops the device."""
        rates = sorted(self._rates)
        usual = rates[len(rates) // 2] * step.size if rates else self._work
        if step.is_usable:
            self._rates.append(self._work / step.size)
        if step.blamed and self._work > UNUSUAL * usual:
            self._gaps[step.blamed] = self._gaps.get(step.blamed, 0.0) + self._work - usual
            self._work, self._ahead = usual, min(self._ahead, usual)
