"""Short traces of kernels: when to take them, and how busy the device is in their steps.

A trace covers three whole steps, of which the first is not used. While it is on, the meter queues a
tiny kernel of its own, a border, at each mark. So the trace itself shows where the segments begin,
by the tracer's own clock. A device pauses for about a microsecond between two kernels even if its
queue is full. This pause counts as busy: idle is what a full queue would have saved.
"""

import random
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenfeed.trainer.stall.idle import PROVEN, UNUSUAL, Accounts, Step, TracedStep
from tokenfeed.trainer.stall.marks import End, MarkChain, Phase

Array = npt.NDArray[np.float64]

TRACED_STEPS = 2
"""Steps of a trace that are used. One more comes before them."""
_MOST_LOST = 0.1
"""A step is not used if a larger share of its kernels is lost."""
_COMPLETE = 0.97
"""A step with CUDA graphs is not used if it has a smaller share of the usual kernels."""
_SPAN_ERROR = 0.01
"""The clocks of the tracer and of the events may differ by this share of a step."""
_BORDER_SECONDS = 5e-6
"""They may also differ by these seconds for each border."""
_MOST_VOID = 3
"""No more traces are taken after this many in a row without a step that can be used."""


@dataclass(slots=True)
class Trace:
    """What a tracer recorded, in seconds by a clock of its own. Intervals are rows of two."""

    borders: Array
    """The kernels of `Tracer.border`, in order. Lost ones are NaN."""
    kernels: Array
    """Kernels of all streams, and copies on the stream of the marks, by their start."""
    lost: npt.NDArray[np.intp]
    """Launches without a record, by segment: the time between two borders."""
    pause: float | None = None
    """Seconds that the device pauses between two kernels although they are queued; None if
    unknown."""
    copies: Array = field(default_factory=lambda: np.empty((0, 2)))
    """Copies on other streams."""
    exchanges: Array = field(default_factory=lambda: np.empty((0, 2)))
    """Kernels that exchange data with other ranks."""
    waits: Array = field(default_factory=lambda: np.empty((0, 2)))
    """Calls in which the host waited for the device."""
    has_graphs: bool = False
    """Whether CUDA graphs ran. Their lost kernels cannot be counted."""


class Tracer(Protocol):
    """Records kernels for a few steps. A trace costs the host some seconds to start and to read."""

    least_seconds: float
    """Seconds from trace to trace at the start of a run."""
    usual_seconds: float
    """Seconds from trace to trace later."""

    def why_not(self) -> str | None:
        """Return why no trace can be taken now; None if one can."""
        ...

    def start(self) -> None:
        """Start to record. May wait for the device. Raises any error if this is not possible."""

    def border(self) -> None:
        """Queue a tiny kernel that the trace will show as a border."""

    def stop(self) -> Trace:
        """Wait for the device, stop to record, and return the trace."""
        ...


@dataclass(slots=True)
class Segments:
    """Figures of the segments between borders, in seconds. Unknown figures are NaN."""

    span: Array
    busy: Array
    kernels: Array
    lost: Array
    waiting: Array
    exchanging: Array
    copying: Array


def read_segments(trace: Trace, pause: float) -> Segments:
    """Return how busy the device was between each two borders.

    Example: kernels run from 0 to 10 µs and from 14 to 20 µs, between borders that end at 0 and
        start at 20 µs. With a pause of 1 µs, the device was busy for 17 µs and idle for 3 µs.
    """
    begin, end = trace.borders[:-1, 1], trace.borders[1:, 0]
    count = len(begin)
    known = trace.borders[np.isfinite(trace.borders[:, 0])]
    blocks = np.concatenate([trace.kernels, known])
    blocks = blocks[np.argsort(blocks[:, 0], kind="stable")]
    ends = np.maximum.accumulate(blocks[:, 1])
    gaps = np.stack([ends[:-1] + pause, blocks[1:, 0]], axis=1)
    gaps = gaps[gaps[:, 1] > gaps[:, 0]]
    starts = np.fmax.accumulate(np.nan_to_num(trace.borders[:, 1], nan=-np.inf))
    place = np.searchsorted(starts, gaps[:, 0], side="right") - 1
    is_inside = (place >= 0) & (place < count)
    gaps, place = gaps[is_inside], place[is_inside]
    idle = gaps[:, 1] - gaps[:, 0]
    exchanging = _overlap(gaps, trace.exchanges)
    copying = np.minimum(idle - exchanging, _overlap(gaps, trace.copies))
    waiting = np.where(_contains(trace.waits, gaps[:, 0] - pause), idle - exchanging - copying, 0.0)

    def by_segment(values: Array) -> Array:
        return np.bincount(place, values, count)[:count].astype(float)

    span = end - begin
    ran = np.searchsorted(starts, trace.kernels[:, 0], side="right") - 1
    kernels = np.bincount(ran[ran >= 0], minlength=count)[:count].astype(float)
    lost = np.bincount(trace.lost, minlength=count)[:count].astype(float)
    busy = (span - by_segment(idle)) * (1 + lost / np.maximum(1, kernels))
    return Segments(span, busy, kernels, lost, *map(by_segment, (waiting, exchanging, copying)))


def _overlap(gaps: Array, intervals: Array) -> Array:
    """Return how many seconds of each gap any of the intervals covers."""
    if not len(intervals):
        return np.zeros(len(gaps))
    intervals = intervals[np.argsort(intervals[:, 0])]
    ends = np.maximum.accumulate(intervals[:, 1])
    starts = np.maximum(intervals[:, 0], np.concatenate([[-np.inf], ends[:-1]]))
    points = np.stack([starts, np.maximum(starts, ends)], axis=1).ravel()
    covered = np.cumsum(np.diff(points, prepend=points[0]) * (np.arange(len(points)) % 2))
    return np.asarray(np.diff(np.interp(gaps, points, covered), axis=1)[:, 0])


def _contains(intervals: Array, moments: Array) -> npt.NDArray[np.bool_]:
    """Return for each moment whether one of the intervals contains it."""
    if not len(intervals):
        return np.zeros(len(moments), bool)
    intervals = intervals[np.argsort(intervals[:, 0])]
    place = np.searchsorted(intervals[:, 0], moments, side="right") - 1
    ends = np.maximum.accumulate(intervals[:, 1])
    return (place >= 0) & (moments <= ends[np.maximum(place, 0)])


class Schedule:
    """Decides after which steps to trace: at regular times, never because of what a step does.

    The distance is a power of two steps, and the exact step comes from a seed. So all ranks of a
    run trace the same steps, although their clocks differ. `Tracing.align` removes the rest.

    Example: steps take 0.1 s, and traces are to be 20 s apart. The distance is 256 steps: the power
    of two next to 200. The traces are within 51 steps of the steps 256, 512, 768, and so on.

    Args:
        first: Step to trace after.
        least: Seconds from trace to trace at the start of a run.
        usual: The same after `_EARLY` traces.
    """

    def __init__(self, first: int, least: float, usual: float) -> None:
        self._least, self._usual = least, usual
        self.next = first
        self.distance = _LEAST_DISTANCE
        self._count = 0
        self._cost = 0.0

    def traced(self, step: int, step_seconds: float, cost: float) -> None:
        """Plan the next trace, now that one has ended at a step.

        Args:
            step: The latest step.
            step_seconds: Seconds of a usual step.
            cost: Host seconds that the trace took to start, to stop and to read.
        """
        self._count += 1
        self._cost += cost
        seconds = self._least
        if self._count >= _EARLY:
            cheap = self._cost / self._count / _MOST_SHARE
            seconds = max(self._usual, min(cheap, _MOST_REST * step * step_seconds))
            seconds *= 2 ** max(0, self._count // _FEW - 1)
        while self.distance * step_seconds < seconds / 2**0.5:
            self.distance *= 2
        self.plan(step)
        if self._count == 1:  # steps after the first trace are compared with those before it
            self.next = max(self.next, step + _STEPS_TO_COMPARE)

    def plan(self, step: int, period: tuple[int, int] | None = None) -> None:
        """Choose the step after which the next trace begins.

        Args:
            step: The latest step.
            period: Distance of unusual steps, and the place of such a step: its number modulo the
                distance. The second step of the trace will be such a step.
        """
        block = (step + self.distance // 2) // self.distance + 1
        moved = random.Random(block * self.distance).uniform(-_JITTER, _JITTER)
        self.next = max(step + 1, round((block + moved) * self.distance))
        if period is not None:
            every, place = period
            self.next += (place - 2 - self.next) % every


_LEAST_DISTANCE = 32
"""Least steps from trace to trace."""
_JITTER = 0.2
"""A trace comes this share of the distance earlier or later, at random."""
_EARLY = 6
"""A run takes this many traces first, whatever they cost."""
_MOST_SHARE = 0.003
"""Later traces take this share of the time."""
_MOST_REST = 0.25
"""The next trace comes at the latest when the run is longer by this share. The speed of the device
may have changed since."""
_FEW = 32
"""The distance doubles after this many traces, since the accounts keep at most 64."""
_STEPS_BEFORE = 10
"""Steps before the first trace, to compare later ones with."""
_STEPS_AFTER = 20
"""Steps after the first trace that are compared with those before it."""
_MORE_BLOCKS = 8
"""Later blocks of as many steps. They show how much the speed changes by itself."""
_MOST_SLOWER = 0.25
"""Steps that are slower by more than this share have another reason than the tracer."""
_STEPS_TO_COMPARE = 48
"""Steps from the first to the second trace, of which enough can be compared."""
_AIM_EVERY = 4
"""One of this many traces may be moved to an unusual step."""
_RECOVERY_STEPS = 20
"""Steps that are left out after a trace. In these, a host that was ahead gets ahead again."""


class Tracing:
    """Takes traces between the steps of a loop, and adds them to the accounts.

    Args:
        tracer: The tracer.
        chain: The marks of the loop.
        accounts: Takes what the traces show.
        warmup: Steps that are not measured.
        is_alone: Whether this is the only rank. Ranks have to trace the same steps, so only a
            single rank aims at unusual steps.
    """

    def __init__(
        self, tracer: Tracer, chain: MarkChain, accounts: Accounts, warmup: int, *, is_alone: bool
    ) -> None:
        self._tracer, self._chain, self._accounts = tracer, chain, accounts
        self._warmup, self._is_alone, self._now = warmup, is_alone, chain.now
        first = warmup + _STEPS_BEFORE
        self.schedule = Schedule(first, tracer.least_seconds, tracer.usual_seconds)
        self.is_on = False
        self._recovering, self._lead = 0, 0.0
        """Steps that are still left out, and the share of steps after which the host had lead."""
        self._why_ended: str | None = None
        self._cost = 0.0
        """Host seconds of the present trace."""
        self._count = self._void = self._left = 0
        self._why_void = ""
        self._labels: list[tuple[Phase, int | None]] = []
        """The phase that each border ends, and the step that it ends."""
        self._steps: dict[int, Step] = {}
        """The steps of the present trace, by the marks."""
        self._pauses: list[float] = []
        self._kernels: list[int] = []
        """Kernels of traced steps with CUDA graphs."""
        self._numbers: list[int] = []
        self._odd: list[int] = []
        self._rates: list[float] = []
        self._before: list[float] = []
        self._after: list[float] = []
        self._behind = 0

    @property
    def why_unmeasured(self) -> str | None:
        """Why there is no valid trace; None if there is one."""
        if self._numbers:
            return None
        return self._why_ended or self._why_void or "no trace has been taken yet"

    @property
    def is_usable(self) -> bool:
        """Whether no trace slows down the present step."""
        return not self.is_on and not self._recovering

    def mark(self, phase: Phase, end: End | None = None) -> float:
        """End a segment as `MarkChain.add` does, with a border if a trace is on."""
        now = self._chain.add(phase, end)
        if self.is_on:
            self._tracer.border()
            self._labels.append((phase, None if end is None else end[0]))
            self._left -= end is not None
        return now

    def end_step(self, number: int, *, may_start: bool) -> None:
        """Start or end a trace after a step, if it is time."""
        is_usable = self.is_usable and number >= self._warmup
        if self._recovering:
            self._recovering -= 1
        if self.is_on:
            if self._left <= 0:
                self.stop()
            return
        if is_usable:
            is_ahead = not self._chain.is_queue_empty()
            self._lead += (is_ahead - self._lead) / min(16, max(1, number - self._warmup))
        if may_start and number >= self.schedule.next:
            self._chain.resolve()
            if self._is_possible(number):
                self._start()

    def align(self, number: int, distance: int) -> None:
        """Trace the same steps as the other ranks, of which the largest distance counts."""
        if distance > self.schedule.distance and self._why_ended is None:
            self.schedule.distance = distance
            self.schedule.plan(number)

    def watch(self, step: Step) -> None:
        """Look at a complete step: learn when to trace, and what traces change."""
        if not step.is_usable:
            self._steps[step.number] = step
            return
        rate = step.work / step.size
        recent = sorted(self._rates[-16:])
        self._rates = [*self._rates[-15:], rate]
        if len(recent) >= 8 and rate > UNUSUAL * recent[len(recent) // 2]:
            self._odd = [*self._odd[-2:], step.number]
        if not self._count:
            self._before = [*self._before[1 - _STEPS_AFTER :], rate]
        elif len(self._after) < (1 + _MORE_BLOCKS) * _STEPS_AFTER:
            self._behind += len(self._after) < _STEPS_AFTER and step.ahead < PROVEN * step.work
            self._after.append(rate)
            if len(self._after) == (1 + _MORE_BLOCKS) * _STEPS_AFTER:
                self._accounts.slower = self._slower()

    def stop(self) -> None:
        """End a trace: wait for the device, and read it."""
        if not self.is_on:
            return
        self.is_on, began = False, self._now()
        try:
            trace = self._tracer.stop()
        except Exception as error:  # whatever a tracer raises: no training fails by its meter
            self._end(f"the tracer failed: {error}")
        else:
            self._chain.resolve()  # the device has passed all marks
            self._accounts.add_trace(self._read(trace))
            self._cost += self._now() - began
            self._plan()
        self._chain.add("tracer")
        self._recovering = _RECOVERY_STEPS if self._lead > 0.5 else 1

    def _is_possible(self, number: int) -> bool:
        """Return whether a trace can be taken now."""
        began = self._now()
        why_not = self._tracer.why_not()
        self._cost = self._now() - began
        if why_not is not None:  # perhaps later
            self._why_void = why_not
            self.schedule.plan(number)
        return why_not is None

    def _start(self) -> None:
        began = self._now()
        try:
            self._tracer.start()
        except Exception as error:
            self._end(f"the tracer failed: {error}")
        else:
            self.is_on, self._left = True, TRACED_STEPS + 1
            self._labels, self._steps = [], {}
        self._cost += self._now() - began
        self._chain.add("tracer")
        if self.is_on:
            self._tracer.border()

    def _read(self, trace: Trace) -> list[TracedStep]:
        """Return the valid steps of a trace."""
        self._count += 1
        if trace.pause is not None:
            self._pauses.append(trace.pause)
        valid = self._valid(trace)
        self._void = 0 if valid else self._void + 1
        if self._void == _MOST_VOID:
            self._end(f"{_MOST_VOID} traces in a row were void: {self._why_void}")
        self._numbers += [step.number for step in valid]
        return valid

    def _plan(self) -> None:
        """Plan the next trace, perhaps at a step that is unusual, if such steps come at equal
        distances."""
        if self._why_ended is not None:
            return
        number = next(number for _, number in reversed(self._labels) if number is not None)
        steps = self._steps.values()
        seconds = [step.work + sum(step.gaps.values()) for step in steps]
        self.schedule.traced(number, median(seconds or [1.0]), self._cost)
        if len(self._odd) < 3 or not self._is_alone:
            return
        every = self._odd[2] - self._odd[1]
        is_regular = every > 2 and self._odd[1] - self._odd[0] == every <= self.schedule.distance
        latest = self._numbers[-_AIM_EVERY * TRACED_STEPS :]
        if is_regular and not any((each - self._odd[2]) % every == 0 for each in latest):
            self.schedule.plan(number, (every, self._odd[2] % every))

    def _slower(self) -> float:
        """Return how much slower steps are since the first trace, as a share of their time.

        CUPTI stays attached after a trace, and may slow down each launch by up to a fifth. Ending
        traces would not undo that.
        """
        before = median(self._before)
        if not before or self._behind < _STEPS_AFTER // 2:
            return 0.0
        blocks = [
            self._after[at : at + _STEPS_AFTER] for at in range(0, len(self._after), _STEPS_AFTER)
        ]
        noise = sum(_deviation(rates) ** 2 / len(rates) for rates in (self._before, blocks[0]))
        levels = [median(block) for block in blocks]
        moves = [abs(later / earlier - 1) for earlier, later in pairwise(levels) if earlier]
        slower = levels[0] / before - 1
        # The host's own ups and downs can be larger.
        least = max(0.01, 3 * noise**0.5 / before, 2 * max(moves))
        return slower if least < slower < _MOST_SLOWER else 0.0

    def _end(self, reason: str) -> None:
        """Take no more traces."""
        self._why_ended, self.schedule.next = reason, sys.maxsize

    def _valid(self, trace: Trace) -> list[TracedStep]:
        if len(trace.borders) != len(self._labels) + 1:
            self._why_void = "borders are missing from the traces"
            return []
        pause = median(self._pauses) if self._pauses else 0.0
        segments = read_segments(trace, pause)
        found, rows, borders = list[TracedStep](), list[int](), 0
        is_first = True
        for row, (phase, number) in enumerate(self._labels):
            borders += 1
            if phase == "work":
                rows.append(row)
            if number is None:
                continue
            if not is_first and (step := self._steps.get(number)) is not None:
                traced = self._traced(segments, rows, step, borders)
                if isinstance(traced, str):
                    self._why_void = traced
                elif not trace.has_graphs or self._is_complete(traced):
                    found.append(traced)
            is_first, rows, borders = False, [], 0
        return found

    def _traced(
        self, segments: Segments, rows: list[int], step: Step, borders: int
    ) -> TracedStep | str:
        """Return the figures of a step, or why they are void."""

        def total(values: Array) -> float:
            return float(values[rows].sum())

        span, kernels, lost = map(total, (segments.span, segments.kernels, segments.lost))
        if not np.isfinite(span):
            return "borders are missing from the traces"
        if not kernels:
            return "the traces contain no kernels (does another program use CUPTI?)"
        if lost > _MOST_LOST * (kernels + lost):
            return f"the tracer loses {lost / (kernels + lost):.0%} of the kernels"
        if abs(span - step.work) > _SPAN_ERROR * step.work + _BORDER_SECONDS * borders:
            return "steps take longer or shorter by the tracer's clock than by events"
        return TracedStep(
            number=step.number,
            size=step.size,
            busy=total(segments.busy),
            kernels=round(kernels + lost),
            span=span,
            trace=self._count,
            waiting=total(segments.waiting),
            exchanging=total(segments.exchanging),
            copying=total(segments.copying),
        )

    def _is_complete(self, step: TracedStep) -> bool:
        """Return whether a step with CUDA graphs has as many kernels as others."""
        self._kernels.append(step.kernels)
        usual = median(self._kernels)
        if step.kernels >= _COMPLETE * usual:
            return True
        self._why_void = "the tracer loses kernels of CUDA graphs"
        return False


def _deviation(values: list[float]) -> float:
    """Return the standard deviation of most of the values, from their median distance."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)
