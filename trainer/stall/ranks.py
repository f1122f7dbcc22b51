"""Several ranks: who is late, and why. Pure, over one reading of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenfeed.trainer.stall.causes import CAUSES, Cause
from tokenfeed.trainer.stall.reading import StallReading

__all__ = ["SlowestRank", "slowest_rank"]


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """The rank that the others wait for."""

    rank: int
    cause: Cause
    """What it waits for itself."""
    seconds: float
    """How much longer than the quickest it kept itself waiting."""
    cost: float
    """Share of the time that the quickest rank lost to it."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is the slowest: {self.cause}; {self.seconds:.2f} s more than the "
            f"quickest ({self.cost:.1%})"
        )


def slowest_rank(readings: Sequence[StallReading]) -> SlowestRank:
    """Of readings by rank, over the same steps.

    All ranks wait for the last in each step, so their wall times are alike. To wait for others is
    communication; who waits least for others is who they wait for, and its own work and causes are
    what they wait for.
    """
    own = [
        reading.seconds - reading.cause_seconds["communication"] if reading.steps else 0.0
        for reading in readings
    ]
    rank = max(range(len(own)), key=own.__getitem__)
    quickest = min(range(len(own)), key=own.__getitem__)
    slow, quick = readings[rank].cause_seconds, readings[quickest].cause_seconds
    longer = own[rank] - own[quickest]
    late: dict[Cause, float] = {
        cause: slow[cause] - quick[cause] for cause in CAUSES if cause != "communication"
    }
    cause = max(late, key=late.__getitem__)
    seconds = readings[rank].seconds
    return SlowestRank(rank, cause, longer, longer / seconds if seconds else 0.0)
