"""The node cache as one process uses it: its threads, its counts, and the pieces it fetches."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np

from tokenfeed.pipeline.caching.eviction import FIRST_END, Until
from tokenfeed.pipeline.caching.node_cache import CacheSet, NodeCache, read_file
from tokenfeed.pipeline.caching.settings import CacheSettings
from tokenfeed.pipeline.caching.traffic import Fetched
from tokenfeed.pipeline.planning.ahead import Ahead
from tokenfeed.pipeline.planning.plan import Position

__all__ = ["Node", "SharedPieces"]

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


Fetch = Callable[[int], bytes]

_LOOK_AGAIN_S = 0.005
_PATIENCE_S = 60.0
"""So long the process that fetches a piece is waited for. One that was stopped keeps its lock."""


class SharedPieces:
    """Numbered pieces of one kind: what the cache has, or what is fetched and then kept there."""

    def __init__(
        self, node: Node, files: CacheSet | None, path: Callable[[int], str], first_lock: int = 0
    ) -> None:
        """
        Args:
            node: The threads and counts of this process.
            files: The cache; None where nothing is kept.
            path: Where the cache has a piece.
            first_lock: The lock of piece 0.
        """
        self._node = node
        self._files = files
        self._path = path
        self._first_lock = first_lock

    def get(self, numbers: list[int], fetch: Fetch) -> dict[int, bytes]:
        """Some pieces; errors are those of `fetch`, which is called in several threads.

        Processes that want the same pieces begin at different ones, and so share the work.
        """
        got = {number: kept for number in numbers if (kept := self._kept(number)) is not None}
        self._node.count(Fetched(hits=len(got)))
        if missing := [number for number in dict.fromkeys(numbers) if number not in got]:
            first = random.randrange(len(missing))
            self._fetch_all(missing[first:] + missing[:first], fetch, got)
        return got

    def again(self, number: int, fetch: Fetch) -> bytes:
        """A piece from the store, for the one in the cache is damaged, or came so."""
        self._node.count(Fetched(damaged=1))
        data = fetch(number)
        self.replace(number, data)
        return data

    def replace(self, number: int, data: bytes) -> None:
        """Have the cache hold this piece in place of the one that it has."""
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
        """A piece; None where another process is fetching it."""
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
