"""A job: one rank's share of a plan, and the data to make it from. Goes to workers as a pickle."""

from dataclasses import dataclass

from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.planning.share import Share
from tokenfeed.pipeline.planning.window import WindowReader

__all__ = ["Job"]


@dataclass(frozen=True, slots=True)
class Job:
    """Which share of which plan."""

    plan: Plan
    reader: WindowReader
    rank: int
    """Among the ranks that share the plan: those of one stream."""
    world_size: int
    """How many these are."""

    def read(self, position: Position) -> Share:
        """Decode a window and gather this rank's share of it."""
        return self.plan.read_share(self.reader, position, self.rank, self.world_size)
