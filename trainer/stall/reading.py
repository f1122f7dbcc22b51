"""Running sums over steps, and readings of them. The difference of two readings is a reading."""

import copy
import math
from collections import defaultdict
from dataclasses import dataclass, field

from tokenfeed.trainer.stall.causes import CAUSES, COUNTED, Cause
from tokenfeed.trainer.stall.work import Charge, LinearFit, SpanKind, WorkSums, idle_seconds

__all__ = ["StallReading", "Sums"]

_FEW = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StallReading:
    """What the measured steps took, and how much of it was stall."""

    steps: int
    tokens: int
    """Real tokens trained in these steps."""
    slots: int
    """Token slots of these steps, padding included."""
    seconds: float
    """Wall time of these steps on the device's clock, stall included."""
    gaps: dict[Cause, float]
    """Idle seconds between spans of work, by cause."""
    work: dict[Charge, WorkSums] = field(default_factory=dict)
    """Spans of work that may have been idle in part."""
    references: dict[SpanKind, LinearFit] = field(default_factory=dict)
    """Seconds that spans take on a device that never waits, by kind."""
    marking_seconds: float = 0.0
    """Host seconds of the meter's marks. Without the marks the device may have idled less."""

    @property
    def cause_seconds(self) -> dict[Cause, float]:
        """Idle seconds by cause."""
        seconds: dict[Cause, float] = {cause: self.gaps.get(cause, 0.0) for cause in CAUSES}
        for (kind, cause), sums in self.work.items():
            seconds[cause] += idle_seconds(sums, self.references.get(kind), cause)
        return seconds

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
            sums.bound
            for (kind, cause), sums in self.work.items()
            if cause != "other" and kind not in self.references
        )

    @property
    def counted_fraction(self) -> float:
        """Share of the wall time that goes to causes of which every occurrence is seen."""
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
            if kind in self.references and cause in (None, charged):
                counts[kind] += sums.count
                bounds[kind] += sums.bound
        squares = (
            min(self.references[kind].half_width(count), bounds[kind]) ** 2
            for kind, count in counts.items()
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
            marking_seconds=self.marking_seconds - earlier.marking_seconds,
        )


@dataclass(slots=True)
class Sums:
    """Running sums behind a reading. Fields have the meaning of those of `StallReading`."""

    steps: int = 0
    tokens: int = 0
    slots: int = 0
    seconds: float = 0.0
    marking_seconds: float = 0.0
    gaps: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    work: defaultdict[Charge, WorkSums] = field(default_factory=lambda: defaultdict(WorkSums))
    queued: dict[SpanKind, LinearFit] = field(default_factory=dict)
    """References from spans whose kernels were all queued before they began. Includes steps that
    are not measured."""
    ahead: dict[SpanKind, LinearFit] = field(default_factory=dict)
    """References from spans at both ends of which the host was ahead."""

    def reference(self, kind: SpanKind) -> LinearFit | None:
        """Return the reference of a kind of spans, preferably from spans behind a full queue."""
        queued, ahead = self.queued.get(kind), self.ahead.get(kind)
        if queued is None or (queued.count < _FEW and ahead is not None):
            return ahead
        return queued

    def read(self) -> StallReading:
        """Return the sums as they are now. Later additions do not change the reading."""
        return StallReading(
            steps=self.steps,
            tokens=self.tokens,
            slots=self.slots,
            seconds=self.seconds,
            marking_seconds=self.marking_seconds,
            gaps=dict(self.gaps),
            work={charge: copy.copy(sums) for charge, sums in self.work.items()},
            references={
                kind: copy.copy(line)
                for kind in self.queued.keys() | self.ahead.keys()
                if (line := self.reference(kind)) is not None
            },
        )
