"""What a loader of data in a store needs: workers, for its own process starts no client, and a
cache of a size that fits the plan."""

from os import PathLike

from tokenfeed.pipeline.caching.place import Need, resolve_cache
from tokenfeed.pipeline.caching.settings import CacheSettings
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.store import FetchingStore, RangedStore
from tokenfeed.pipeline.planning.plan import Plan

__all__ = ["cache_for", "has_remote"]


def has_remote(sources: tuple[OpenedSplit, ...]) -> bool:
    """Whether one of them is in a store."""
    return any(isinstance(source.store, RangedStore) for source in sources)


def cache_for(
    sources: tuple[OpenedSplit, ...],
    plan: Plan,
    cache_dir: str | PathLike[str] | None,
    cache_bytes: int | None,
) -> CacheSettings | None:
    """The cache for those of the sources that are in stores; None where none is, or for memory
    alone.

    Raises:
        ConfigError: It is too small for the plan, or the folder cannot hold it.
    """
    if not has_remote(sources):
        return None
    total = window = 0
    for source, read in zip(sources, plan.order.batches_read, strict=True):
        if isinstance(source.store, RangedStore):
            size = sum(shard.bytes for shard in source.split.shards)
            total += 0 if isinstance(source.store, FetchingStore) else size
            window += size * read // source.batches // plan.order.num_windows
    return resolve_cache(cache_dir, cache_bytes, Need(total, max(1, window)))
