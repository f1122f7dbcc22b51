"""A job: one rank's share of a plan, and the data to make it from. Goes to workers as a pickle."""

from dataclasses import dataclass

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.planning.share import Share
from tokenfeed.pipeline.planning.window import WindowReader

__all__ = ["Job", "check_epochs", "check_rank"]


@dataclass(frozen=True, slots=True)
class Job:
    """Which share of which plan."""

    plan: Plan
    reader: WindowReader
    rank: int
    world_size: int

    def read(self, position: Position) -> Share:
        """Decode a window and gather this rank's share of it."""
        return self.plan.read_share(self.reader, position, self.rank, self.world_size)


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a rank that there is not."""
    if not 0 <= rank < world_size:
        raise ConfigError(f"`rank`={rank} is not in range({world_size}), the `world_size`.")


def check_epochs(epochs: int | None) -> None:
    """Refuse a pass without an epoch."""
    if epochs is not None and epochs < 1:
        raise ConfigError(f"`epochs`={epochs} must be at least 1, or None for no end.")
