"""Readings of a meter: the time of the measured steps, and the part of it that was stall."""

from dataclasses import dataclass, field

from tokenfeed.trainer.stall.causes import CAUSES, Cause


@dataclass(frozen=True, kw_only=True, slots=True)
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
    """Idle seconds in brackets, by cause. They are exact."""
    inside: dict[Cause, float] = field(default_factory=dict)
    """Idle seconds inside the work, by cause: an estimate from traces."""
    least: float = 0.0
    most: float = 0.0
    """Least and most idle seconds inside the work. The least may be below 0: marks take lead that
    is missing in a later gap."""
    is_inside_measured: bool = True

    @property
    def cause_seconds(self) -> dict[Cause, float]:
        """Idle seconds by cause."""
        gaps, inside = self.gaps, self.inside
        return {cause: gaps.get(cause, 0.0) + inside.get(cause, 0.0) for cause in CAUSES}

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
        return min(1.0, sum(self.cause_fractions.values()))

    def interval(self, cause: Cause | None = None) -> tuple[float, float]:
        """Return the least and most share of the time that was stall of a cause, or of any."""
        whole, inside = self.seconds or 1.0, sum(self.inside.values())
        gaps = sum(self.gaps.values()) if cause is None else self.gaps.get(cause, 0.0)
        part = 1.0 if cause is None else self.inside.get(cause, 0.0) / (inside or 1.0)
        low, high = gaps + part * self.least, gaps + part * self.most
        return max(0.0, low / whole), min(1.0, high / whole)

    def since(self, earlier: "StallReading") -> "StallReading":
        """Return the part of this reading after an earlier one of the same meter.

        A later trace may correct what was read before, so no part is below 0.
        """

        def rest(now: dict[Cause, float], before: dict[Cause, float]) -> dict[Cause, float]:
            return {each: max(0.0, now[each] - before.get(each, 0.0)) for each in now}

        return StallReading(
            steps=self.steps - earlier.steps,
            tokens=self.tokens - earlier.tokens,
            slots=self.slots - earlier.slots,
            seconds=max(0.0, self.seconds - earlier.seconds),
            gaps=rest(self.gaps, earlier.gaps),
            inside=rest(self.inside, earlier.inside),
            is_inside_measured=self.is_inside_measured,
        )


def numbers_of(reading: StallReading) -> list[float]:
    """Return the figures of a reading that ranks exchange: steps, seconds, idle seconds by cause,
    tokens."""
    causes = reading.cause_seconds
    idle = (causes[cause] for cause in CAUSES)
    return [reading.steps, reading.seconds, *idle, reading.tokens]


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Median and maximum of the seconds of some steps."""

    p50: float
    max: float
