"""The node cache as one process uses it: its threads, its counts, and the pieces it fetches."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np

from tokenfeed.pipeline.caching.node_cache import (
    CacheSet,
    CacheSettings,
    NodeCache,
)
from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.pipeline.format.store import RangedStore
from tokenfeed.pipeline.planning.plan import Ahead, Position
from tokenfeed.pipeline.remote.retrying import Traffic


@dataclass(frozen=True, slots=True)
class Fetched(Traffic):
    """Counts and times of reading from stores and from the cache."""

    hits: int = 0
    """Number of record batches and footers read from the cache."""
    damaged: int = 0
    """Number of pieces that were damaged in the cache or on the network, and fetched again."""
    waited_s: float = 0.0
    """Seconds of waiting for the bytes of windows, from the cache, a store or another process."""


_THREADS, _SMALL_AHEAD, _LARGE_AHEAD = 64, 16, 4
"""Concurrent requests: for a window that the loop waits for; and for later windows, with small or
large requests. Large requests are few, so that each finishes soon on a slow network."""


class Prefetcher:
    """A thread that prefetches the windows after the current one, in the order of the plan.

    All processes of a node prefetch the same windows. What one of them has fetched, the others
    skip.
    """

    def __init__(self, fetch: Callable[[np.ndarray], None], num_windows: int) -> None:
        """
        Args:
            fetch: Puts record batches into the cache.
            num_windows: Number of windows to prefetch.
        """
        self._fetch = fetch
        self._num_windows = num_windows
        self._ahead: Ahead | None = None
        self._done: Position | None = None
        self._thread = ThreadPoolExecutor(1, "tokenfeed prefetches")

    def follow(self, ahead: Ahead) -> None:
        """Set the current window. Prefetching after the window before ends at its next window."""
        if self._ahead and ahead.position < self._ahead.position:
            self._done = None  # the loader went back: start again from there
        self._ahead = ahead
        self._thread.submit(self._fetch_after, ahead)

    def _fetch_after(self, ahead: Ahead) -> None:
        for position in islice(ahead.windows(), self._num_windows):
            if self._ahead is not ahead:
                return
            if self._done is None or self._done < position:
                try:
                    self._fetch(ahead.batches(position))
                except (OSError, TokenfeedError):
                    return  # the read of this window will raise the error
                self._done = position


class Node:
    """Threads, counts and cache of one process. A pickled copy has its own threads and counts."""

    def __init__(self, settings: CacheSettings | None) -> None:
        """Without settings there is no cache, and nothing is prefetched."""
        self.settings = settings
        self.stores: list[RangedStore] = []
        """The stores that this process reads from."""
        self._prefetcher: Prefetcher | None = None
        self._lock = threading.Lock()
        self._counted = Fetched()
        self.ahead: Ahead | None = None
        """The plan and the current window, for prefetching; None before the first window."""

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
        return NodeCache(self.settings) if self.settings else None

    def open_set(self, name: str) -> CacheSet | None:
        """Return the cached files of one split of one data set, by its name in the cache; None
        without a cache."""
        return None if self._cache is None else CacheSet(self._cache, name)

    def count(self, counted: Fetched) -> None:
        """Add counts that no store keeps."""
        with self._lock:
            self._counted += counted

    @property
    def fetched(self) -> Fetched:
        """Counts of this process's reads from all stores and from the cache."""
        of_stores = (Fetched(*astuple(store.traffic)) for store in self.stores)
        return sum(of_stores, self._counted)

    def prefetch(self, fetch: Callable[[np.ndarray], None]) -> None:
        """Prefetch the windows after the current one in a thread, with `fetch`."""
        if self.ahead is None or self.settings is None:
            return
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(fetch, self.settings.windows_ahead)
        self._prefetcher.follow(self.ahead)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the block as waiting for data."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.count(Fetched(waited_s=time.perf_counter() - started))


Fetch = Callable[[int], bytes]

_LOOK_AGAIN_S = 0.005
_PATIENCE_S = 60.0
"""Seconds to wait for a process that fetches a piece. A stopped process keeps its lock."""


class SharedPieces:
    """Numbered pieces of one kind, from the cache or fetched and then written to the cache."""

    def __init__(
        self, node: Node, files: CacheSet | None, name: Callable[[int], str], first_lock: int = 0
    ) -> None:
        """
        Args:
            node: Threads and counts of this process.
            files: Cached files of the split; None without a cache.
            name: Returns the name of a piece in the cache.
            first_lock: Number of the lock of piece 0.
        """
        self._node = node
        self._files = files
        self._name = name
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
            self._files.cache.remove(self._name(number))
            self._files.cache.write(self._name(number), data)

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
            self._files.cache.write(self._name(number), data)
            return data

    def _kept(self, number: int) -> bytes | None:
        return self._files.read(self._name(number)) if self._files else None
