"""Spans of work: how long they take, and how long they take on a device that never waits.

A span is a reference if the host got ahead of the device before it and stayed ahead: the device had
each kernel in time. Idle time inside the other spans is the time by which they take longer than
references, as a sum. The sum is clipped at 0, not each span: clipping each one would count noise as
stall.

Example: references of a kind take 10 ms for 1,000 slots. Three others of 1,000 slots take 9, 11
    and 13 ms, which is 33 ms, or 3 ms longer than 3 references. So 3 ms were idle. Clipping each
    span would count 0 + 1 + 3 = 4 ms.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenfeed.trainer.stall.causes import Cause
from tokenfeed.trainer.stall.clocks import Moment
from tokenfeed.trainer.stall.statistics import student

__all__ = ["Charge", "LinearFit", "OpenStep", "SpanKind", "WorkSpan", "WorkSums", "idle_seconds"]

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
    """Upper bound of its idle time: after this long, the host had queued all of it."""
    hidden_idle: float = 0.0
    """Idle time that the device would have had before the span, if earlier spins had not hidden
    it."""
    lead_before: float = 0.0
    """The host's lead when the device started the span."""
    lead: float = 0.0
    """The host's lead at the latest mark."""
    is_queued: bool = False
    """Whether the host had queued all of it when the device started. Then none of it was idle."""
    is_ahead: bool = False
    """Whether the host was ahead of the device at both ends. Then hardly any of it was idle."""
    cause: Cause = "launch"
    slots: float = 0.0

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
