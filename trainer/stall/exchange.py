"""What the ranks of a loop tell each other, from host to host."""

from collections.abc import Callable
from typing import Any

from tokenfeed.trainer.stall.ranks import RankStall, numbers_of, rank_stalls
from tokenfeed.trainer.stall.reading import StallReading

__all__ = ["Exchange", "Ranks", "is_distributed"]

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
