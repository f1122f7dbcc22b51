"""Sums of steps, and a reading of them, whose differences are readings again."""

import copy
import math
from collections import defaultdict
from dataclasses import dataclass, field

from tokenfeed.trainer.stall.causes import CAUSES, COUNTED, Cause
from tokenfeed.trainer.stall.work import Kind, Line, Payment, WorkSums, idle_seconds

__all__ = ["StallReading", "Sums"]

_FEW = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StallReading:
    """What whole steps after the warm-up cost, and how much of it was stall."""

    steps: int
    tokens: int
    """Real tokens trained in these steps."""
    slots: int
    """Token slots of these steps, padding included."""
    seconds: float
    """Wall time of these steps on the device's clock, stall included."""
    gaps: dict[Cause, float]
    """Idle seconds in which nothing of the training was queued."""
    work: dict[Payment, WorkSums] = field(default_factory=dict)
    """Stretches of work that may have been idle in part."""
    references: dict[Kind, Line] = field(default_factory=dict)
    """What such stretches take when the device is not kept waiting."""
    marking_seconds: float = 0.0
    """Host seconds of the meter's own marks, without which the device may have idled less."""

    @property
    def cause_seconds(self) -> dict[Cause, float]:
        """Idle seconds by cause."""
        seconds: dict[Cause, float] = {cause: self.gaps.get(cause, 0.0) for cause in CAUSES}
        for (kind, payer), sums in self.work.items():
            seconds[payer] += idle_seconds(sums, self.references.get(kind), payer)
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
        """Idle time that there may be besides, at most: inside work that has no reference."""
        return sum(
            sums.bound
            for (kind, payer), sums in self.work.items()
            if payer != "other" and kind not in self.references
        )

    @property
    def counted_fraction(self) -> float:
        """Share of the wall time of causes of which every occurrence is seen."""
        fractions = self.cause_fractions
        return sum(fractions[cause] for cause in COUNTED)

    def reference_error(self, cause: Cause | None = None) -> float:
        """Return how far the idle seconds inside work, which are differences, may be off: of a
        cause, or of all of them."""
        counts: dict[Kind, float] = defaultdict(float)
        bounds: dict[Kind, float] = defaultdict(float)
        for (kind, payer), sums in self.work.items():
            if kind in self.references and cause in (None, payer):
                counts[kind] += sums.count
                bounds[kind] += sums.bound
        squares = (
            min(self.references[kind].half_width(count), bounds[kind]) ** 2
            for kind, count in counts.items()
        )
        return math.sqrt(sum(squares))

    def since(self, earlier: "StallReading") -> "StallReading":
        """The part of this reading that came after an earlier one of the same meter."""
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
                payment: sums.less(earlier.work.get(payment, WorkSums()))
                for payment, sums in self.work.items()
            },
            references=self.references,
            marking_seconds=self.marking_seconds - earlier.marking_seconds,
        )


@dataclass(slots=True)
class Sums:
    """What a reading is of: it grows by steps, and fields mean what they mean there."""

    steps: int = 0
    tokens: int = 0
    slots: int = 0
    seconds: float = 0.0
    marking_seconds: float = 0.0
    gaps: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    work: defaultdict[Payment, WorkSums] = field(default_factory=lambda: defaultdict(WorkSums))
    queued: dict[Kind, Line] = field(default_factory=dict)
    """What stretches take that were queued as a whole before they began, also in steps that do not
    count."""
    ahead: dict[Kind, Line] = field(default_factory=dict)
    """What stretches take where the host was ahead at both ends."""

    def reference(self, kind: Kind) -> Line | None:
        """Return what stretches of a kind take when the device is not kept waiting: by those that
        were queued as a whole, unless these are few."""
        queued, ahead = self.queued.get(kind), self.ahead.get(kind)
        if queued is None or (queued.count < _FEW and ahead is not None):
            return ahead
        return queued

    def read(self) -> StallReading:
        """The sums as they are now; what is added later does not change the reading."""
        return StallReading(
            steps=self.steps,
            tokens=self.tokens,
            slots=self.slots,
            seconds=self.seconds,
            marking_seconds=self.marking_seconds,
            gaps=dict(self.gaps),
            work={payment: copy.copy(sums) for payment, sums in self.work.items()},
            references={
                kind: copy.copy(line)
                for kind in self.queued.keys() | self.ahead.keys()
                if (line := self.reference(kind)) is not None
            },
        )
