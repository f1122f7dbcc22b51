"""Makes windows: one rank's slice of a plan, from the data. Goes to workers as a pickle."""

from dataclasses import dataclass

from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.windows.rank_slice import RankSlice
from tokenfeed.pipeline.windows.reader import WindowReader

__all__ = ["WindowMaker"]


@dataclass(frozen=True, slots=True)
class WindowMaker:
    """Which share of which plan."""

    plan: Plan
    reader: WindowReader
    rank: int
    """Among the ranks that share the plan: those of one stream."""
    world_size: int
    """How many these are."""

    def read(self, position: Position) -> RankSlice:
        """Decode a window and gather this rank's share of it."""
        return self.plan.read_slice(self.reader, position, self.rank, self.world_size)
