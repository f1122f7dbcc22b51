"""Spans of work, running sums over spans and steps, and readings of these sums with error bars.

A span is a reference if the host got ahead of the device before it and stayed ahead: the device had
each kernel in time. The idle time inside the other spans is their total time minus the time of
their references. Only the total is clipped at 0: clipping each span would count noise as stall. The
difference of two readings is a reading.

Example: references of a kind take 10 ms for 1,000 slots. Three others of 1,000 slots take 9, 11
    and 13 ms, which is 33 ms, or 3 ms longer than 3 references. So 3 ms were idle. Clipping each
    span would count 0 + 1 + 3 = 4 ms.

The ranks of a run exchange figures of their readings, which show the slowest rank.
"""

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenfeed.trainer.stall.causes import CAUSES, COUNTED, Cause
from tokenfeed.trainer.stall.device import Moment

_WORK_FOLLOWS = ("data", "communication")
_OPEN = 0.1
"""Relative error of a reference that was seen only once or twice."""


class SpanKind(NamedTuple):
    """What comes before and after a span. Spans of one kind run the same kernels."""

    opener: str
    closer: str

    @property
    def is_between_steps(self) -> bool:
        """Whether the span lies between steps, where hardly any work is queued."""
        return self.opener == "step" or (self.closer == "data" and self.opener not in _WORK_FOLLOWS)


class Charge(NamedTuple):
    """The cause that the idle time of some spans of a kind is charged to."""

    kind: SpanKind
    cause: Cause


@dataclass(slots=True)
class WorkSpan:
    """Work between two marks, without the interruptions in it. Times are in seconds."""

    opener: str
    opened: float
    """Host time at its start."""
    end: Moment
    """The latest mark."""
    spin: float = 0.0
    """Length of the spin just before the span; 0 without a spin."""
    kind: SpanKind = field(default=SpanKind("", ""))
    seconds: float = 0.0
    bound: float = 0.0
    """Upper bound of the span's idle time: seconds until the host had queued the whole span."""
    hidden_idle: float = 0.0
    """Idle time that the device would have had before the span, if earlier spins had not hidden
    it."""
    lead_before: float = 0.0
    """The host's lead when the device started the span."""
    lead: float = 0.0
    """The host's lead at the latest mark."""
    is_queued: bool = False
    """Whether the host had queued the whole span when the device started it. If so, the device did
    not idle in the span."""
    is_ahead: bool = False
    """Whether the host was ahead of the device at both ends. If so, the device hardly idled in the
    span."""
    cause: Cause = "launch"
    slots: float = 0.0
    host: float = 0.0
    """Host seconds to queue the span."""
    is_interrupted: bool = False
    """Whether the collector or the compiler ran inside the span."""

    @property
    def is_known(self) -> bool:
        """Whether the span is a reference."""
        return self.is_queued or self.is_ahead


@dataclass(slots=True)
class OpenStep:
    """The figures of a step that has not ended."""

    seconds: float = 0.0
    marking: float = 0.0
    """Host seconds of the meter's marks."""
    gaps: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    """Idle seconds between spans."""
    spans: list[WorkSpan] = field(default_factory=list)
    """Finished spans of work."""
    span: WorkSpan | None = None
    """The unfinished span."""
    opener: str = "step"
    """What comes before the next span."""
    marks: int = 0
    """Number of marks inside the work."""
    has_batch: bool = False
    """Whether the loop has requested a batch."""


@dataclass(slots=True)
class WorkSums:
    """Sums of spans of one kind that are charged to one cause."""

    count: float = 0.0
    slots: float = 0.0
    seconds: float = 0.0
    bound: float = 0.0

    def add(self, span: WorkSpan) -> None:
        """Add a span."""
        self.count += 1
        self.slots += span.slots
        self.seconds += span.seconds + span.hidden_idle
        self.bound += span.bound + span.hidden_idle

    def less(self, other: "WorkSums") -> "WorkSums":
        """Return the sums of the spans after an earlier state of these sums."""
        return WorkSums(
            self.count - other.count,
            self.slots - other.slots,
            self.seconds - other.seconds,
            self.bound - other.bound,
        )


@dataclass(slots=True)
class LinearFit:
    """Seconds as a linear function of slots: a fit by least squares, kept as sums."""

    count: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, slots: float, seconds: float) -> None:
        """Add a point."""
        self.count += 1
        self.x += slots
        self.xx += slots * slots
        self.y += seconds
        self.xy += slots * seconds
        self.yy += seconds * seconds

    def total(self, count: float, slots: float) -> float:
        """Return the seconds of `count` spans that have `slots` slots together."""
        intercept, slope = self._coefficients()
        return intercept * count + slope * slots

    def half_width(self, count: float) -> float:
        """Return the error of `total` for `count` other spans, in seconds.

        In 95 of 100 cases the sum of the spans differs from `total` by less. The error has two
        parts: the spans vary, and so does the fit, since its own points vary.

        Example: 4 references take 9, 11, 9 and 11 ms, a variance of 4 / 3 ms². The sum of 2 other
        spans has a variance of 4 / 3 * (2² / 4 + 2) = 4 ms², so a deviation of 2 ms. Student's
        quantile for 3 degrees of freedom is 3.1, and the error 6.1 ms.
        """
        if self.count < 3:
            return count * _OPEN * self.y / self.count
        intercept, slope = self._coefficients()
        squares = max(0.0, self.yy - intercept * self.y - slope * self.xy)
        variance = squares / (self.count - 1) * (count * count / self.count + count)
        return student(self.count - 1) * math.sqrt(variance)

    def _coefficients(self) -> tuple[float, float]:
        spread = self.xx - self.x * self.x / self.count
        if spread <= 1e-6 * self.xx:
            return self.y / self.count, 0.0
        if self.count < 4:  # too few for two numbers
            return 0.0, self.y / self.x
        slope = (self.xy - self.x * self.y / self.count) / spread
        return (self.y - slope * self.x) / self.count, slope


def idle_seconds(sums: WorkSums, reference: LinearFit | None, cause: Cause) -> float:
    """Return the idle seconds of spans.

    Without a reference, the idle time of work is unknown and counts as 0. Between steps there is
    hardly any work, so all of it may count.
    """
    if reference is None or not reference.count:
        return sums.bound if cause == "other" else 0.0
    longer = sums.seconds - reference.total(sums.count, sums.slots)
    return min(max(0.0, longer), sums.bound)


@dataclass(kw_only=True, slots=True)
class StallReading:
    """The time that the measured steps took, and the part of that time that was stall."""

    steps: int = 0
    tokens: int = 0
    """Real tokens trained in these steps."""
    slots: int = 0
    """Token slots of these steps, padding included."""
    seconds: float = 0.0
    """Wall time of these steps on the device's clock, stall included."""
    gaps: dict[Cause, float] = field(default_factory=dict)
    """Idle seconds between spans of work, by cause."""
    work: dict[Charge, WorkSums] = field(default_factory=dict)
    """Spans of work that may have been idle in part."""
    references: dict[SpanKind, LinearFit] = field(default_factory=dict)
    """Seconds that spans take on a device that never waits, by kind."""
    upper_references: dict[SpanKind, LinearFit] = field(default_factory=dict)
    """Upper bounds of these seconds, for kinds without a reference. So idle time has a lower
    bound."""
    marking_seconds: float = 0.0
    """Host seconds of the meter's marks. Without the marks the device may have idled less."""

    @property
    def cause_seconds(self) -> dict[Cause, float]:
        """Idle seconds by cause."""
        seconds: dict[Cause, float] = {cause: self.gaps.get(cause, 0.0) for cause in CAUSES}
        for (kind, cause), sums in self.work.items():
            seconds[cause] += idle_seconds(sums, self._reference(kind), cause)
        return seconds

    def _reference(self, kind: SpanKind) -> LinearFit | None:
        return self.references.get(kind) or self.upper_references.get(kind)

    @property
    def tokens_per_s(self) -> float:
        """Real tokens per second of wall time; 0 before the first measured step."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def cause_fractions(self) -> dict[Cause, float]:
        """Share of the wall time by cause; all 0 before the first measured step."""
        whole = self.seconds or 1.0
        return {cause: seconds / whole for cause, seconds in self.cause_seconds.items()}

    @property
    def fraction(self) -> float:
        """Share of the wall time that was stall of any cause."""
        return sum(self.cause_fractions.values())

    @property
    def unseen_seconds(self) -> float:
        """Upper bound of further idle time: in spans without a reference."""
        return sum(
            sums.bound - idle_seconds(sums, self.upper_references.get(kind), cause)
            for (kind, cause), sums in self.work.items()
            if cause != "other" and kind not in self.references
        )

    @property
    def counted_fraction(self) -> float:
        """Share of the wall time of the causes in `COUNTED`, whose every occurrence is measured."""
        fractions = self.cause_fractions
        return sum(fractions[cause] for cause in COUNTED)

    def reference_error(self, cause: Cause | None = None) -> float:
        """Return the error of the idle seconds inside work, which are differences from references.

        Args:
            cause: A cause, or None for all causes.
        """
        counts: dict[SpanKind, float] = defaultdict(float)
        bounds: dict[SpanKind, float] = defaultdict(float)
        for (kind, charged), sums in self.work.items():
            if self._reference(kind) is not None and cause in (None, charged):
                counts[kind] += sums.count
                bounds[kind] += sums.bound
        squares = (
            min(line.half_width(count), bounds[kind]) ** 2
            for kind, count in counts.items()
            if (line := self._reference(kind)) is not None
        )
        return math.sqrt(sum(squares))

    def since(self, earlier: "StallReading") -> "StallReading":
        """Return the part of this reading after an earlier one of the same meter."""
        return StallReading(
            steps=self.steps - earlier.steps,
            tokens=self.tokens - earlier.tokens,
            slots=self.slots - earlier.slots,
            seconds=self.seconds - earlier.seconds,
            gaps={
                cause: seconds - earlier.gaps.get(cause, 0.0)
                for cause, seconds in self.gaps.items()
            },
            work={
                charge: sums.less(earlier.work.get(charge, WorkSums()))
                for charge, sums in self.work.items()
            },
            references=self.references,
            upper_references=self.upper_references,
            marking_seconds=self.marking_seconds - earlier.marking_seconds,
        )


def numbers_of(reading: StallReading) -> list[float]:
    """Return the figures of a reading that ranks exchange: steps, seconds, idle seconds by
    cause."""
    causes = reading.cause_seconds
    return [reading.steps, reading.seconds, *(causes[cause] for cause in CAUSES)]


_LEAST_SECONDS = 1e-7
_WIDTH = math.log(1.04)


class Histogram:
    """Counts values of at least 0 in bins 4 % wide, so a quantile is within 2 %. The largest value
    is exact."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.largest = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        if value > _LEAST_SECONDS:
            self._counts[int(math.log(value / _LEAST_SECONDS) / _WIDTH)] += 1
            self.largest = max(self.largest, value)

    def quantile(self, share: float, total: int) -> float:
        """Return the value that `share` of `total` values do not exceed. Values never added are
        0."""
        left = share * total - (total - self._counts.total())
        if left <= 0:
            return 0.0
        for bin_number in sorted(self._counts):
            left -= self._counts[bin_number]
            if left <= 0:
                return min(self.largest, _LEAST_SECONDS * math.exp((bin_number + 0.5) * _WIDTH))
        return self.largest


_MOST_BATCHES = 64
_LEAST_BATCHES = 8


@dataclass(slots=True)
class _Batch:
    steps: int = 0
    seconds: float = 0.0
    idle: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, steps: int, seconds: float, idle: dict[Cause, float]) -> None:
        self.steps += steps
        self.seconds += seconds
        for cause, part in idle.items():
            self.idle[cause] += part

    def of(self, cause: Cause | None) -> float:
        return sum(self.idle.values()) if cause is None else self.idle[cause]


class BatchMeans:
    """Seconds and idle seconds, summed over batches of steps.

    Error bars come from batch means. Neighbouring steps are alike, so the spread of single steps
    would promise too narrow a bar. The means of batches of many steps are nearly independent. When
    there are too many batches, neighbours are merged. Causes whose every occurrence is measured are
    left out, with their time: the sample is the steps between these events.

    Example: 8 batches take 10 s each, and idle for 1.0, 1.2, 0.8, 1.1, 0.9, 1.0, 1.2 and 0.8 s,
    which is a share of 10 %. The deviations from 1.0 s have 0.18 s² as their sum of squares. With 7
    degrees of freedom, Student's quantile is 2.36. The half-width is 2.36 * √(8/7 * 0.18) / 80 =
    1.3 %.
    """

    def __init__(self) -> None:
        self._size = 1
        self.batches: list[_Batch] = []

    def add(self, seconds: float, idle: dict[Cause, float]) -> None:
        """Add a step."""
        seconds -= sum(part for cause, part in idle.items() if cause in COUNTED)
        idle = {cause: part for cause, part in idle.items() if cause not in COUNTED}
        if not self.batches or self.batches[-1].steps >= self._size:
            self.batches.append(_Batch())
        self.batches[-1].add(1, seconds, idle)
        if len(self.batches) > _MOST_BATCHES:
            self._merge()

    def half_width(self, cause: Cause | None) -> float | None:
        """Return the half-width of the 95 % interval of an idle share; None after too few steps.

        Args:
            cause: The cause of the idle time; None for all causes. Counted causes and their time
                are left out.
        """
        count = len(self.batches)
        if count < _LEAST_BATCHES:
            return None
        total = sum(batch.seconds for batch in self.batches) or 1.0
        share = sum(batch.of(cause) for batch in self.batches) / total
        squares = sum((batch.of(cause) - share * batch.seconds) ** 2 for batch in self.batches)
        return student(count - 1) * math.sqrt(count / (count - 1) * squares) / total

    def _merge(self) -> None:
        # Merge neighbours: twice the steps per batch, half the batches.
        self._size *= 2
        for first, second in zip(self.batches[::2], self.batches[1::2], strict=False):
            first.add(second.steps, second.seconds, second.idle)
        self.batches = self.batches[::2]


def student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's distribution, by the Cornish-Fisher expansion."""
    return 1.96 + 2.372 / freedom + 2.823 / freedom**2


_LATEST = 4096


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Median and maximum of the seconds of some steps."""

    p50: float
    max: float


class StepTimes:
    """Seconds per step."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_LATEST)

    def add(self, seconds: float) -> None:
        """Add a step."""
        self._latest.append(seconds)

    def take(self) -> StepSeconds | None:
        """Return figures of the steps since the last call, at most the latest 4,096; None without
        steps."""
        seconds, self._latest = sorted(self._latest), deque(maxlen=_LATEST)
        return StepSeconds(seconds[len(seconds) // 2], seconds[-1]) if seconds else None
