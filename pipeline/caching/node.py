"""The node cache as one process uses it: its threads, its counts, and the pieces it fetches."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tokenfeed.pipeline.caching.eviction import FIRST_END, Until
from tokenfeed.pipeline.caching.node_cache import CacheSet, NodeCache, read_file
from tokenfeed.pipeline.caching.settings import CacheSettings
from tokenfeed.pipeline.planning.ahead import Ahead
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.remote.retrying import Traffic

__all__ = ["CountingStore", "Fetched", "Node", "SharedPieces"]


@runtime_checkable
class CountingStore(Protocol):
    """A store that counts its requests."""

    @property
    def traffic(self) -> Traffic:
        """Requests and bytes of this process."""
        ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """Counts and times of reading from stores."""

    traffic: Traffic = field(default_factory=Traffic)
    hits: int = 0
    """Number of record batches and footers read from the cache."""
    damaged: int = 0
    """Number of pieces that were damaged in the cache or on the network, and fetched again."""
    waited_s: float = 0.0
    """Seconds of waiting for the bytes of windows, from the cache, a store or another process."""

    def __add__(self, other: "Fetched") -> "Fetched":
        return Fetched(
            self.traffic + other.traffic,
            self.hits + other.hits,
            self.damaged + other.damaged,
            self.waited_s + other.waited_s,
        )

    def since(self, before: "Fetched") -> "Fetched":
        """Return the counts since `before`."""
        now, then = self.traffic, before.traffic
        traffic = Traffic(
            now.requests - then.requests,
            now.bytes - then.bytes,
            now.retries - then.retries,
            now.outage_s - then.outage_s,
        )
        return Fetched(
            traffic,
            self.hits - before.hits,
            self.damaged - before.damaged,
            self.waited_s - before.waited_s,
        )


_THREADS, _SMALL_AHEAD, _LARGE_AHEAD = 64, 16, 4
"""Concurrent requests: for a window that the loop waits for; and for later windows, with small or
large requests. Large requests are few, so that each finishes soon on a slow network."""
_LONGEST_WAIT_S = 900.0
"""Seconds after which waiting counts as a hang. It is longer than all retries of a request and the
wait for another process together."""
_BEHIND = 4
"""Windows that another process of the node may be behind this one."""


class Node:
    """Threads, counts and cache of one process. A pickled copy has its own threads and counts."""

    def __init__(self, settings: CacheSettings | None) -> None:
        """Without settings there is no cache."""
        self.settings = settings
        self._until: dict[str, Until] = {}
        self._lock = threading.Lock()
        self.counted = Fetched()
        """Counts that no store keeps: cache hits, damaged files, time waited."""
        self._waiting = 0
        self._waiting_since_s = 0.0
        self.ahead: Ahead | None = None
        """The plan and the current window; None before the first window."""

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """Threads for data that the loop waits for."""
        return ThreadPoolExecutor(_THREADS, "tokenfeed reads")

    @cached_property
    def threads_ahead(self) -> ThreadPoolExecutor:
        """Threads for data of later windows: few if each request is large."""
        count = _LARGE_AHEAD if self.settings and self.settings.is_whole else _SMALL_AHEAD
        return ThreadPoolExecutor(count, "tokenfeed reads ahead")

    @cached_property
    def _cache(self) -> NodeCache | None:
        return NodeCache(self.settings, self._until) if self.settings else None

    def open_set(self, name: str, source: int, batch_ends: np.ndarray) -> CacheSet | None:
        """Return the cached files of one split of one data set; None without a cache.

        Args:
            name: Name of the set in the cache.
            source: Number of the plan's source.
            batch_ends: Running total of the record batches of the shards, shape (shards,).
        """
        if self._cache is None:
            return None
        self._until[name] = partial(self._windows_until, source, batch_ends)
        return CacheSet(self._cache, name)

    def _windows_until(
        self, source: int, batch_ends: np.ndarray, numbers: np.ndarray
    ) -> np.ndarray:
        """Return the windows until pieces are read next, shape (K,).

        The plan gives that for record batches. A footer is needed with any record batch of its
        shard: with the first of its cached batches, or at the latest after the average distance
        between two windows that read from a shard. Example with two shards of 10 record batches,
        `batch_ends` = [10, 20], and pieces [3, 12, FIRST_END + 0, FIRST_END + 1]: batches 3 and 12
        are read in 5 and 90 windows, a shard on average every 8 windows. The footers are needed in
        min(8, 5) = 5 and min(8, 90) = 8 windows: [5, 90, 5, 8].
        """
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
        found[is_end] = of_shard[
            np.minimum(ends, last)
        ]  # a file of another program may have any number
        return found

    def count(self, counted: Fetched) -> None:
        """Add counts that no store keeps."""
        with self._lock:
            self.counted += counted

    @property
    def is_waiting(self) -> bool:
        """Return whether the process waits for data of a store. After 15 minutes it counts as hung:
        by then every request has succeeded or failed."""
        return self._waiting > 0 and time.monotonic() - self._waiting_since_s < _LONGEST_WAIT_S

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the block as waiting for data."""
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


Fetch = Callable[[int], bytes]

_LOOK_AGAIN_S = 0.005
_PATIENCE_S = 60.0
"""Seconds to wait for a process that fetches a piece. A stopped process keeps its lock."""


class SharedPieces:
    """Numbered pieces of one kind, from the cache or fetched and then written to the cache."""

    def __init__(
        self, node: Node, files: CacheSet | None, path: Callable[[int], str], first_lock: int = 0
    ) -> None:
        """
        Args:
            node: Threads and counts of this process.
            files: Cached files of the split; None without a cache.
            path: Returns the path of a piece in the cache.
            first_lock: Number of the lock of piece 0.
        """
        self._node = node
        self._files = files
        self._path = path
        self._first_lock = first_lock

    def get(self, numbers: list[int], fetch: Fetch) -> dict[int, bytes]:
        """Return pieces by number. Several threads call `fetch`; its errors are raised here.

        Each process starts at a random piece, so processes that need the same pieces share the
        work.
        """
        got = {number: kept for number in numbers if (kept := self._kept(number)) is not None}
        self._node.count(Fetched(hits=len(got)))
        if missing := [number for number in dict.fromkeys(numbers) if number not in got]:
            first = random.randrange(len(missing))
            self._fetch_all(missing[first:] + missing[:first], fetch, got)
        return got

    def again(self, number: int, fetch: Fetch) -> bytes:
        """Fetch a piece again, because it was damaged in the cache or on the network."""
        self._node.count(Fetched(damaged=1))
        data = fetch(number)
        self.replace(number, data)
        return data

    def replace(self, number: int, data: bytes) -> None:
        """Replace a piece in the cache."""
        if self._files:
            self._files.remove(self._path(number))
            self._files.write(self._path(number), data)

    def _fetch_all(self, missing: list[int], fetch: Fetch, got: dict[int, bytes]) -> None:
        patient_until = time.monotonic() + _PATIENCE_S
        while missing:
            one = partial(self._one, fetch, time.monotonic() < patient_until)
            found = self._node.threads.map(one, missing)
            pairs = zip(missing, found, strict=True)
            got.update((number, piece) for number, piece in pairs if piece is not None)
            missing = [number for number in missing if number not in got]
            if missing:
                time.sleep(_LOOK_AGAIN_S)

    def _one(self, fetch: Fetch, is_patient: bool, number: int) -> bytes | None:
        """Return a piece; None if another process is fetching it."""
        if self._files is None:
            return fetch(number)
        with self._files.lock(self._first_lock + number) as is_mine:
            if (kept := self._kept(number)) is not None:
                return kept
            if not is_mine and is_patient:
                return None
            data = fetch(number)
            self._files.write(self._path(number), data)
            return data

    def _kept(self, number: int) -> bytes | None:
        return read_file(self._path(number)) if self._files else None
