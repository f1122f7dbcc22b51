"""Several ranks: the reading of each, their exchange, and which rank is late and why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenfeed.trainer.stall.causes import CAUSES, Cause
from tokenfeed.trainer.stall.reading import StallReading

__all__ = [
    "Exchange",
    "RankStall",
    "Ranks",
    "SlowestRank",
    "is_distributed",
    "numbers_of",
    "rank_stalls",
    "slowest_rank",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStall:
    """The stall of one rank, by its own meter."""

    rank: int
    steps: int
    seconds: float
    """Wall time of these steps."""
    causes: dict[Cause, float]
    """Idle seconds, of causes that have any."""
    fraction: float
    """Share of the wall time that was stall of any cause."""
    waited_seconds: float
    """Of its communication, what it had more than the rank that has the least: that one is waited
    for, and what it has is the exchange itself."""

    @property
    def step_seconds(self) -> float:
        """Of a step."""
        return self.seconds / self.steps

    def own_seconds(self) -> "dict[Cause | Literal['work'], float]":
        """Of a step, by cause and for the work: all but communication."""
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
    """The rank that the others wait for."""

    rank: int
    cause: Cause | Literal["work"]
    """What makes it late: what it waits for itself, or that its work takes longer."""
    step_seconds: float
    """How much longer than the quickest it takes for itself, a step."""
    cost: float
    """Share of the time that the quickest rank loses to it."""


def numbers_of(reading: StallReading) -> list[float]:
    """What a rank tells the others."""
    causes = reading.cause_seconds
    return [reading.steps, reading.seconds, *(causes[cause] for cause in CAUSES)]


def rank_stalls(told: Sequence[Sequence[float]]) -> list[RankStall]:
    """Of what all ranks told, in their order; nothing of one that is alone."""
    if len(told) < 2:
        return []
    known = [_step_communication(numbers) for numbers in told if numbers[0]]
    least = min(known, default=0.0)
    return [_rank_stall(rank, numbers, least) for rank, numbers in enumerate(told)]


def slowest_rank(ranks: Sequence[RankStall]) -> SlowestRank | None:
    """Who the others wait for; None until every rank has measured a step.

    All ranks wait for the last in each step, so their wall times are alike. To wait for others is
    communication; who waits least for others is who they wait for, and its own work and causes are
    what they wait for. Steps that a meter leaves out are not the same on all ranks: hence means.
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


def _rank_stall(rank: int, numbers: Sequence[float], least: float) -> RankStall:
    steps, seconds = int(numbers[0]), numbers[1]
    causes = dict(zip(CAUSES, numbers[2:], strict=True))
    return RankStall(
        rank=rank,
        steps=steps,
        seconds=seconds,
        causes={cause: idle for cause, idle in causes.items() if idle},
        fraction=sum(causes.values()) / (seconds or 1.0),
        waited_seconds=max(0.0, causes["communication"] - least * steps),
    )


def _step_communication(numbers: Sequence[float]) -> float:
    return numbers[2 + CAUSES.index("communication")] / numbers[0]


Exchange = Callable[[list[float]], list[list[float]]]
"""Gives what every rank gave, in their order."""


def is_distributed() -> bool:
    """Whether `torch.distributed` is initialized."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


class Ranks:
    """The readings of all ranks at the latest exchange."""

    def __init__(self) -> None:
        self.latest: list[RankStall] = []
        self._group: Any = None

    def tell(self, reading: StallReading, exchange: Exchange | None) -> None:
        """Exchange readings with the other ranks. With one rank, keep the latest readings."""
        told = (exchange or self._by_gloo)(numbers_of(reading))
        self.latest = rank_stalls(told) or self.latest

    def _by_gloo(self, numbers: list[float]) -> list[list[float]]:
        """Exchange over a gloo group: the default group may wait for a GPU."""
        import torch.distributed as dist

        if not is_distributed():
            self._group = None  # of ranks that have parted; others may meet
            return [numbers]
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, numbers, group=self._group)
        return told
