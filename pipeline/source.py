"""Where windows come from: this process, or workers (`pool`). Both hand out leases in order."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.plan import Plan, Position
from tokenfeed.pipeline.share import Share
from tokenfeed.pipeline.window import WindowReader

__all__ = ["InlineSource", "Job", "Lease", "WindowSource", "check_epochs", "check_rank"]


@dataclass(frozen=True, slots=True)
class Job:
    """What a source has to do: which share of which plan. Goes to workers as a pickle."""

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


@dataclass(frozen=True, slots=True)
class Lease:
    """A share, and the memory it stands in until it is released."""

    share: Share
    seconds: float
    """Time that making it took a worker."""
    ready: int
    """Windows that were ready when it was taken, itself included."""
    release: Callable[[], None] = field(default=lambda: None)


class WindowSource(Protocol):
    """Windows in order, without an end: epoch follows epoch."""

    def take(self) -> Lease:
        """The next window, waited for if it has to be."""

    def is_ready(self) -> bool:
        """Whether `take` would return at once."""

    def close(self) -> None:
        """End whatever runs."""


class InlineSource:
    """Makes each window when it is asked for, in this process."""

    def __init__(
        self, job: Job, start: Position, stage: Callable[[Share], Share] | None = None
    ) -> None:
        """`stage` puts a share where a device can copy it from."""
        self._job = job
        self._next = start
        self._stage = stage

    def take(self) -> Lease:
        """The next window."""
        started = time.perf_counter()
        share = self._job.read(self._next)
        if self._stage:
            share = self._stage(share)
        self._next = self._job.plan.next_window(self._next)
        return Lease(share, time.perf_counter() - started, ready=0)

    def is_ready(self) -> bool:
        """Never: nothing is made ahead."""
        return False

    def close(self) -> None:
        """Nothing runs."""
