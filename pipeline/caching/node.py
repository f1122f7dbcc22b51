"""What a process has to read from stores: threads, counts, and the cache it shares with others."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np

from tokenfeed.pipeline.caching.node_cache import CacheSet, NodeCache
from tokenfeed.pipeline.caching.settings import CacheSettings
from tokenfeed.pipeline.caching.store import Fetched
from tokenfeed.pipeline.caching.sweep import FIRST_END, Until
from tokenfeed.pipeline.planning.ahead import Ahead
from tokenfeed.pipeline.planning.plan import Position

__all__ = ["Node"]

_THREADS, _SMALL_AHEAD, _LARGE_AHEAD = 64, 16, 4
"""Requests at once: of a window that is waited for, and of those that come later. Large ones are
few, or none of them would end soon where the network is slow."""
_LONGEST_WAIT_S = 900.0
"""More than a store is asked again and again, and another process is waited for before."""
_BEHIND = 4
"""Windows that another process may still read after this one has."""


class Node:
    """Made once a process; a copy, as a worker gets it, has threads and counts of its own."""

    def __init__(self, settings: CacheSettings | None) -> None:
        """Without settings nothing is kept."""
        self.settings = settings
        self._until: dict[str, Until] = {}
        self._lock = threading.Lock()
        self.counted = Fetched()
        """What no store counts."""
        self._waiting = 0
        self._waiting_since_s = 0.0
        self.ahead: Ahead | None = None
        """The plan, and where it is read at present; None before the first window."""

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """For what is waited for."""
        return ThreadPoolExecutor(_THREADS, "tokenfeed reads")

    @cached_property
    def threads_ahead(self) -> ThreadPoolExecutor:
        """For what comes later: few, where each request is large."""
        count = _LARGE_AHEAD if self.settings and self.settings.is_whole else _SMALL_AHEAD
        return ThreadPoolExecutor(count, "tokenfeed reads ahead")

    @cached_property
    def _cache(self) -> NodeCache | None:
        return NodeCache(self.settings, self._until) if self.settings else None

    def open_set(self, name: str, source: int, batch_ends: np.ndarray) -> CacheSet | None:
        """The files of one split of one data set; None where nothing is kept.

        Args:
            name: Its own.
            source: Which of the plan's sources it is.
            batch_ends: Where the record batches of each shard end, shape (shards,).
        """
        if self._cache is None:
            return None
        self._until[name] = partial(self._windows_until, source, batch_ends)
        return CacheSet(self._cache, name)

    def _windows_until(
        self, source: int, batch_ends: np.ndarray, numbers: np.ndarray
    ) -> np.ndarray:
        """When pieces are read next. A footer is read with a record batch of its shard: the next
        one in the cache, or any, as often as the plan has some of a shard."""
        if self.ahead is None:
            return np.zeros(len(numbers), np.int64)
        epoch, window, _ = self.ahead.position
        ahead = Ahead(self.ahead.plan, Position(epoch, max(0, window - _BEHIND), 0))
        is_end = numbers >= FIRST_END
        batches, ends = numbers[~is_end], numbers[is_end] - FIRST_END
        found = np.empty(len(numbers), np.int64)
        found[~is_end] = ahead.until(source, batches)
        of_shard = np.full(len(batch_ends), ahead.between(source, len(batch_ends)))
        shards, last = np.searchsorted(batch_ends, batches, "right"), len(batch_ends) - 1
        np.minimum.at(of_shard, np.minimum(shards, last), found[~is_end])
        found[is_end] = of_shard[np.minimum(ends, last)]  # a foreign file may have any number
        return found

    def count(self, counted: Fetched) -> None:
        """Count what no store knows of."""
        with self._lock:
            self.counted += counted

    @property
    def is_waiting(self) -> bool:
        """Whether something waited for is on its way: the store ends that, sooner or later, and
        what lasts longer than it allows is no waiting but a hang."""
        return self._waiting > 0 and time.monotonic() - self._waiting_since_s < _LONGEST_WAIT_S

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While something is fetched that is waited for."""
        started = time.perf_counter()
        with self._lock:
            if not self._waiting:
                self._waiting_since_s = time.monotonic()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
            self.count(Fetched(waited_s=time.perf_counter() - started))
