"""Reading from stores: what the remote sources of a reader have in common.

Imported where a source is in a store: others start without it.
"""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from tokenfeed.pipeline.caching.node import Node
from tokenfeed.pipeline.caching.prefetcher import Prefetcher
from tokenfeed.pipeline.caching.settings import CacheSettings
from tokenfeed.pipeline.caching.store import Fetched
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.planning.ahead import Ahead
from tokenfeed.pipeline.windows.remote_batches import RemoteBatches

__all__ = ["Remote"]


class Remote:
    """One cache, and one thread that fetches ahead, for all of them."""

    def __init__(self, cache: CacheSettings | None) -> None:
        """Without a cache nothing is kept, and nothing fetched ahead."""
        self._node = Node(cache)
        self._sources: list[RemoteBatches] = []
        self._prefetcher: Prefetcher | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, as a worker gets it, fetches for itself."""
        return self.__dict__ | {"_prefetcher": None}

    def open(self, source: OpenedSplit, number: int, only: Collection[str] | None) -> RemoteBatches:
        """The record batches of a source; see `RemoteBatches`."""
        self._sources.append(RemoteBatches(source, number, only, self._node))
        return self._sources[-1]

    @property
    def fetched(self) -> Fetched:
        """What this process has asked of stores."""
        return sum((source.fetched for source in self._sources), self._node.counted)

    @property
    def is_waiting(self) -> bool:
        """Whether a store is waited for, which will answer or fail in the end."""
        return self._node.is_waiting

    def begin(self, ahead: Ahead | None) -> None:
        """Say what is read now: by that the cache knows what it needs least."""
        self._node.ahead = ahead

    def go_on(self, fetch: Callable[[np.ndarray], None]) -> None:
        """Have `fetch` bring the record batches of coming windows nearer, in a thread."""
        ahead, settings = self._node.ahead, self._node.settings
        if ahead is None or settings is None:
            return
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(fetch, settings.windows_ahead)
        self._prefetcher.follow(ahead)
