"""The ranks of a run, compared: the stall of each, and the rank that is late.

Ranks exchange the figures of their own meters: steps, seconds, and idle seconds by cause.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenfeed.trainer.stall.causes import CAUSES, Cause

LEAST_COST = 0.03
"""A rank is late if it is behind by more than this share of a step."""


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
    tokens: int = 0
    """Real tokens that the rank's meter counted in these steps."""

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
    """What makes the rank late: its largest excess over the median rank."""
    step_seconds: float
    """Seconds per step that its own work and causes take beyond those of the median rank."""
    cost: float
    """The same as a share of a step."""
    hidden_seconds: float = 0.0
    """Seconds per step that the median rank waits inside its work, such as in the all-reduce of a
    backward pass, where no meter sees the wait."""

    @property
    def is_late(self) -> bool:
        """Whether the other ranks lose more than 3 % of a step."""
        return self.cost > LEAST_COST


Exchange = Callable[[list[float]], list[list[float]]]
"""Takes the figures of this rank, and returns those of all ranks, in order."""


def rank_stalls(readings: Sequence[Sequence[float]], first_rank: int = 0) -> list[RankStall]:
    """Return the stall of each rank from exchanged figures; empty for a single rank.

    Args:
        readings: Steps, seconds, idle seconds of each of `CAUSES`, and perhaps tokens, by rank.
        first_rank: The rank of the first reading. Ranks of one node may begin above 0.
    """
    if len(readings) < 2:
        return []
    column = 2 + CAUSES.index("communication")
    least = min((numbers[column] / numbers[0] for numbers in readings if numbers[0]), default=0.0)
    return [
        RankStall(
            rank=first_rank + place,
            steps=int(steps),
            seconds=seconds,
            causes={cause: idle for cause, idle in zip(CAUSES, rest, strict=False) if idle},
            fraction=sum(rest[: len(CAUSES)]) / (seconds or 1.0),
            waited_seconds=max(0.0, readings[place][column] - least * steps),
            tokens=int(sum(rest[len(CAUSES) :])),
        )
        for place, (steps, seconds, *rest) in enumerate(readings)
    ]


def slowest_rank(ranks: Sequence[RankStall]) -> SlowestRank | None:
    """Return the rank that the others wait for; None until every rank has measured a step.

    All ranks wait for the last one in each step, so their wall times are alike. If this wait is
    measured as communication, the last rank is the one whose own work and causes take longest. If
    the ranks wait inside the work, as in the backward pass of DDP, all of them seem to work equally
    long. The last rank is then the one whose own causes alone take longest. The larger of both
    excesses over the median rank counts. Meters may leave out different steps on different ranks,
    so means per step are compared.

    Example: both ranks take 100 ms per step. Rank 0 has 70 ms of work and 30 ms of communication,
    rank 1 has 70 ms of work, 25 ms of data and 5 ms of communication. Rank 1 is late by 25 ms, its
    cause is data, and its cost is 25 %. Without communication, rank 0 has 100 ms of work, and rank
    1 has 75 ms. Rank 1 is late by the same 25 ms, which the work of rank 0 contains.
    """
    if not ranks or not all(each.steps for each in ranks):
        return None
    own = [each.own_seconds() for each in ranks]
    wholes = [sum(seconds.values()) for seconds in own]
    causes = [whole - seconds["work"] for whole, seconds in zip(wholes, own, strict=True)]
    late, middle, longer = max(map(_last, (wholes, causes)), key=lambda found: found[2])
    seen = wholes[late] - wholes[middle]
    step = ranks[late].step_seconds
    return SlowestRank(
        rank=ranks[late].rank,
        cause=max(own[late], key=lambda cause: own[late][cause] - own[middle][cause]),
        step_seconds=longer,
        cost=longer / step if step else 0.0,
        hidden_seconds=max(0.0, longer - max(0.0, seen)),
    )


def _last(seconds: list[float]) -> tuple[int, int, float]:
    """Return the rank with the most seconds, the median rank, and the difference."""
    last, middle = seconds.index(max(seconds)), seconds.index(statistics.median_low(seconds))
    return last, middle, seconds[last] - seconds[middle]


def is_distributed() -> bool:
    """Return whether `torch.distributed` is initialized."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def own_place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks: 0 of 1 without torch.distributed."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
