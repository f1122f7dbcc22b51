"""Where windows come from: this process, or workers (`pool`). Both hand out leases in order."""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import RankSlice

if TYPE_CHECKING:
    from tokenfeed.pipeline.caching.store import Fetched

__all__ = ["InlineSource", "Lease", "WindowSource", "end_with_interpreter"]


@dataclass(frozen=True, slots=True)
class Lease:
    """A slice, and the memory it stands in until it is released."""

    rank_slice: RankSlice
    seconds: float
    """Time that making it took a worker."""
    ready: int
    """Windows that were ready when it was taken, itself included."""
    release: Callable[[], None] = field(default=lambda: None)
    fetched: "Fetched | None" = None
    """What the workers took of stores since the lease before; None of local data."""


class WindowSource(Protocol):
    """Windows in order, without an end: epoch follows epoch."""

    def take(self) -> Lease:
        """The next window, waited for if it has to be."""
        ...

    def is_ready(self) -> bool:
        """Whether `take` would return at once."""
        ...

    def close(self) -> None:
        """End whatever runs."""


class InlineSource:
    """Makes each window when it is asked for, in this process."""

    def __init__(
        self,
        maker: WindowMaker,
        start: Position,
        stage: Callable[[RankSlice], RankSlice] | None = None,
    ) -> None:
        """`stage` puts a slice where a device can copy it from."""
        self._maker = maker
        self._next = start
        self._stage = stage

    def take(self) -> Lease:
        """The next window."""
        started = time.perf_counter()
        rank_slice = self._maker.make(self._next)
        if self._stage:
            rank_slice = self._stage(rank_slice)
        self._next = self._maker.plan.next_window(self._next)
        return Lease(rank_slice, time.perf_counter() - started, ready=0)

    def is_ready(self) -> bool:
        """Never: nothing is made ahead."""
        return False

    def close(self) -> None:
        """Nothing runs."""


def end_with_interpreter() -> None:
    """Where the interpreter ends, which has closed the source, end a daemon thread quietly."""
    if not threading.main_thread().is_alive():
        sys.exit()
