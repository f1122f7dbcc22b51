"""Single windows, made in a worker: for a process that shall not talk to stores itself."""

from tokenfeed.pipeline.feeding.pool import WorkerPool
from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import RankSlice

__all__ = ["WorkerMaker"]


class WorkerMaker:
    """Starts a worker for each window, which costs half a second: for what is seldom asked."""

    def __init__(self, maker: WindowMaker, timeout: float) -> None:
        """As for a `WorkerPool`."""
        self._maker = maker
        self._timeout = timeout

    @property
    def plan(self) -> Plan:
        """Which windows there are."""
        return self._maker.plan

    def make(self, position: Position) -> RankSlice:
        """The same as `WindowMaker.make` gives."""
        pool = WorkerPool(self._maker, position, num_workers=1, timeout=self._timeout)
        try:
            return pool.take().rank_slice
        finally:
            pool.close()
