"""Stretches of the training's work: how long they take, and how long they would take of a device
that is never kept waiting.

A stretch before which the host got ahead, and stayed ahead, is a reference: the device had its
kernels when it wanted them. What the others took longer, in sum, was idle. The sum is clipped and
no single stretch: clipping each would count noise as stall.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenfeed.trainer.stall.causes import Cause
from tokenfeed.trainer.stall.clocks import Moment
from tokenfeed.trainer.stall.statistics import student

__all__ = ["Kind", "Line", "OpenStep", "Payment", "Stretch", "WorkSums", "idle_seconds"]

_WORK_FOLLOWS = ("data", "communication")
_OPEN = 0.1
"""So much of what was seen once or twice may be chance."""


class Kind(NamedTuple):
    """Between which two things a stretch lies; those of a kind run the same kernels."""

    opener: str
    closer: str

    @property
    def is_between(self) -> bool:
        """Whether it lies between steps, where hardly anything is queued."""
        return self.opener == "step" or (self.closer == "data" and self.opener not in _WORK_FOLLOWS)


class Payment(NamedTuple):
    """Who pays for the idle time of stretches of a kind."""

    kind: Kind
    payer: Cause


@dataclass(slots=True)
class Stretch:
    """Work between two marks, less the interruptions in it."""

    opener: str
    opened: float
    """Host time, as all that follows."""
    end: Moment
    """So far."""
    spin: float = 0.0
    """How far it was made to begin behind the host."""
    kind: Kind = field(default=Kind("", ""))
    seconds: float = 0.0
    bound: float = 0.0
    """No more of it was idle: after that long, all of it was queued."""
    regained: float = 0.0
    """How much longer it had been idle without the spins before."""
    lead_before: float = 0.0
    """Of the host, when the device began."""
    lead: float = 0.0
    """At the end so far."""
    is_queued: bool = False
    """Whether the host had queued all of it when the device began: then nothing of it was idle."""
    is_ahead: bool = False
    """Whether the host was ahead of the device at both ends: then hardly any of it was idle."""
    payer: Cause = "launch"
    slots: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it is taken for idle nowhere."""
        return self.is_queued or self.is_ahead


@dataclass(slots=True)
class OpenStep:
    """What has come of a step that is not over."""

    seconds: float = 0.0
    marking: float = 0.0
    """Host seconds of marks that the host was not ahead of."""
    gaps: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    """Idle seconds."""
    stretches: list[Stretch] = field(default_factory=list)
    """Of work; those that are over."""
    stretch: Stretch | None = None
    """The one that is not."""
    opener: str = "step"
    """What the next one begins behind."""
    marks: int = 0
    """Inside the work."""
    has_batch: bool = False
    """Whether one was asked for."""


@dataclass(slots=True)
class WorkSums:
    """Stretches of one kind and one payer, in sum."""

    count: float = 0.0
    slots: float = 0.0
    seconds: float = 0.0
    bound: float = 0.0

    def add(self, stretch: Stretch) -> None:
        """Add one."""
        self.count += 1
        self.slots += stretch.slots
        self.seconds += stretch.seconds + stretch.regained
        self.bound += stretch.bound + stretch.regained

    def less(self, other: "WorkSums") -> "WorkSums":
        """What came after an earlier state."""
        return WorkSums(
            self.count - other.count,
            self.slots - other.slots,
            self.seconds - other.seconds,
            self.bound - other.bound,
        )


@dataclass(slots=True)
class Line:
    """Seconds as a line of slots, by least squares, from sums."""

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
        """Seconds of so many stretches of so many slots together."""
        intercept, slope = self._coefficients()
        return intercept * count + slope * slots

    def half_width(self, count: float) -> float:
        """Return half of the interval that holds, in 95 of 100 cases, how much longer than by this
        line `count` other stretches take: the line is as uncertain as they vary."""
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


def idle_seconds(sums: WorkSums, reference: Line | None, payer: Cause) -> float:
    """What of these stretches was idle; without a reference nothing is known of work, and between
    steps there is none."""
    if reference is None or not reference.count:
        return sums.bound if payer == "other" else 0.0
    longer = sums.seconds - reference.total(sums.count, sums.slots)
    return min(max(0.0, longer), sums.bound)
