"""The readings of all ranks, their exchange, and the slowest rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenfeed.trainer.stall.causes import CAUSES, Cause
from tokenfeed.trainer.stall.reading import StallReading


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStall:
    """The stall of one rank, measured by its own meter."""

    rank: int
    steps: int
    seconds: float
    """Wall time of these steps."""
    causes: dict[Cause, float]
    """Idle seconds by cause, without causes that have none."""
    fraction: float
    """Share of the wall time that was stall of any cause."""
    waited_seconds: float
    """This rank's seconds of communication, less the smallest of any rank. The smallest value is
    the exchange itself; the rest is waiting for late ranks."""

    @property
    def step_seconds(self) -> float:
        """Seconds per step."""
        return self.seconds / self.steps

    def own_seconds(self) -> "dict[Cause | Literal['work'], float]":
        """Return seconds per step by cause, and for the work. Leaves out communication."""
        idle: dict[Cause | Literal["work"], float] = {
            cause: self.causes.get(cause, 0.0) / self.steps
            for cause in CAUSES
            if cause != "communication"
        }
        communication = self.causes.get("communication", 0.0) / self.steps
        idle["work"] = self.step_seconds - communication - sum(idle.values())
        return idle


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowestRank:
    """The rank that the other ranks wait for."""

    rank: int
    cause: Cause | Literal["work"]
    """What makes the rank late: its largest excess over the quickest rank."""
    step_seconds: float
    """Seconds per step that its own work and causes take beyond those of the quickest rank."""
    cost: float
    """Share of the time that the quickest rank loses by waiting for this rank."""


def numbers_of(reading: StallReading) -> list[float]:
    """Return the figures of a reading that ranks exchange: steps, seconds, idle seconds by
    cause."""
    causes = reading.cause_seconds
    return [reading.steps, reading.seconds, *(causes[cause] for cause in CAUSES)]


def rank_stalls(readings: Sequence[Sequence[float]]) -> list[RankStall]:
    """Return the stall of each rank from exchanged figures; empty for a single rank."""
    if len(readings) < 2:
        return []
    place = 2 + CAUSES.index("communication")
    least = min((numbers[place] / numbers[0] for numbers in readings if numbers[0]), default=0.0)
    return [
        RankStall(
            rank=rank,
            steps=int(steps),
            seconds=seconds,
            causes={cause: idle for cause, idle in zip(CAUSES, causes, strict=True) if idle},
            fraction=sum(causes) / (seconds or 1.0),
            waited_seconds=max(0.0, readings[rank][place] - least * steps),
        )
        for rank, (steps, seconds, *causes) in enumerate(readings)
    ]


def slowest_rank(ranks: Sequence[RankStall]) -> SlowestRank | None:
    """Return the rank that the others wait for; None until every rank has measured a step.

    All ranks wait for the last one in each step, so their wall times are alike. Waiting is
    communication. So the last rank is the one whose own work and causes take longest. Meters may
    leave out different steps on different ranks, so means per step are compared.

    Example: both ranks take 100 ms per step. Rank 0 has 70 ms of work and 30 ms of communication,
    rank 1 has 70 ms of work, 25 ms of data and 5 ms of communication. Rank 1 is late by 25 ms, its
    cause is data, and its cost is 25 %.
    """
    if not ranks or not all(each.steps for each in ranks):
        return None
    own = [each.own_seconds() for each in ranks]
    totals = [sum(seconds.values()) for seconds in own]
    last, first = (totals.index(found) for found in (max(totals), min(totals)))
    longer = totals[last] - totals[first]
    step = ranks[last].step_seconds
    return SlowestRank(
        rank=ranks[last].rank,
        cause=max(own[last], key=lambda cause: own[last][cause] - own[first][cause]),
        step_seconds=longer,
        cost=longer / step if step else 0.0,
    )


Exchange = Callable[[list[float]], list[list[float]]]
"""Takes the figures of this rank, and returns those of all ranks, by rank."""


def is_distributed() -> bool:
    """Return whether `torch.distributed` is initialized."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def own_place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks: 0 of 1 without torch.distributed."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
