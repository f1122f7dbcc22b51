"""What makes the windows of a loader, of any of its plans, and with how many workers."""

from typing import Literal

import torch

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.caching.settings import CacheSettings
from tokenfeed.pipeline.feeding.cores import cores_per_rank
from tokenfeed.pipeline.feeding.feed import Feed
from tokenfeed.pipeline.feeding.placement import Ranks, resolve_workers
from tokenfeed.pipeline.feeding.remote import has_remote
from tokenfeed.pipeline.feeding.stats import Counters
from tokenfeed.pipeline.feeding.tuner import Tuner
from tokenfeed.pipeline.feeding.worker_maker import WorkerMaker
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.windows.compare import Maker
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.reader import WindowReader

__all__ = ["Workshop"]


class Workshop:
    """Starts nothing until a feed is asked for its first batch."""

    def __init__(
        self,
        sources: tuple[OpenedSplit, ...],
        cache: CacheSettings | None,
        ranks: Ranks,
        *,
        num_workers: int | Literal["auto"],
        timeout: float,
    ) -> None:
        """As `ShardLoader` was told.

        Raises:
            ConfigError: A setting is out of range, or workers cannot run here.
        """
        self._sources, self._cache, self._ranks = sources, cache, ranks
        self._timeout = checks.number("timeout", timeout, unit="seconds")
        self._least_workers = int(has_remote(sources))
        self.tuner = Tuner(cores_per_rank()) if num_workers == "auto" else None
        """Changes the number of workers, until someone sets it."""
        self.num_workers = self.able(1 if num_workers == "auto" else num_workers)
        """At the beginning of a feed."""

    def able(self, num_workers: int) -> int:
        """A number of workers that this machine can run, and the data need.

        Raises:
            ConfigError: There is none.
        """
        return resolve_workers(num_workers, least=self._least_workers)

    def employ(self, num_workers: int) -> None:
        """Have so many from now on."""
        self.num_workers, self.tuner = num_workers, None

    def maker(self, plan: Plan) -> WindowMaker:
        """Makes this rank's slices in this process."""
        reader = WindowReader(self._sources, cache=self._cache)
        return WindowMaker(plan, reader, self._ranks.rank_in_group, self._ranks.group_size)

    def one_by_one(self, plan: Plan) -> Maker:
        """The same for single windows; of a store in a worker each."""
        maker = self.maker(plan)
        return WorkerMaker(maker, self._timeout) if self._least_workers else maker

    def feed(self, plan: Plan, start: Position, device: torch.device, counters: Counters) -> Feed:
        """Batches on a device from a position on."""
        return Feed(
            self.maker(plan),
            start,
            device,
            self._sources[0].manifest.tokenizer.pad_id,
            num_workers=self.num_workers,
            timeout=self._timeout,
            tuner=self.tuner,
            counters=counters,
        )
