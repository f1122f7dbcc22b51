"""The record batches of sources in stores: each in one request, by way of the node's cache."""

import logging
import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from itertools import accumulate, islice
from typing import Any

import numpy as np
import xxhash

from tokenfeed.pipeline.caching.node import Fetched, Node, SharedPieces
from tokenfeed.pipeline.caching.settings import CacheSettings
from tokenfeed.pipeline.errors import ShardFormatError, TokenfeedError
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.store import FetchingStore, RangedStore
from tokenfeed.pipeline.planning.ahead import Ahead
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.windows.remote_shards import DAMAGED, RemoteShard, RemoteShards

_AT_ONCE = 128
"""Record batches in memory before decoding: enough to keep the threads busy."""
_RUN_BYTES = 8 << 20
"""Bytes of a request for neighbouring record batches, if the whole split will be cached."""
_log = logging.getLogger(__name__)

Shards = dict[int, RemoteShard]


class RemoteBatches:
    """Record batches of one source in a store. One thread may read while another one prefetches."""

    def __init__(
        self, source: OpenedSplit, number: int, only: Collection[str] | None, node: Node
    ) -> None:
        """Send no request yet.

        Args:
            source: The split. Its store supports ranged reads.
            number: Number of the source in the plan.
            only: Columns to decode; None for all. All columns are fetched.
            node: Threads, counts and cache of this process.
        """
        assert isinstance(source.store, RangedStore)
        self._source, self._store, self._number = source, source.store, number
        self._only = only
        self._node = node
        self._infos = source.split.shards
        self._batch_ends = array("q", accumulate(info.batches for info in self._infos))
        self._row_ends = array("q", accumulate(info.rows for info in self._infos))
        name = f"{self._source.manifest.fingerprint} {self._infos[0].file}"
        files = None
        if not isinstance(self._store, FetchingStore):
            own = xxhash.xxh3_64_hexdigest(name.encode())
            files = self._node.open_set(own, self._number, len(self._infos))
        self._files = files
        self._batches = SharedPieces(self._node, files, files.batch if files else str)
        self._shards = RemoteShards(self._source, self._store, self._only, self._node, files)

    def __getstate__(self) -> dict[str, Any]:
        """A pickled copy, as a worker gets it, has no footers and no locks."""
        return {"args": (self._source, self._number, self._only, self._node)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["args"])  # type: ignore[misc]

    @property
    def fetched(self) -> Fetched:
        """Counts of this process's requests to the store."""
        return Fetched(*astuple(self._store.traffic))

    def read(self, numbers: Sequence[int]) -> Iterator[tuple[Rows, int]]:
        """Decode record batches. Fetch missing ones concurrently."""
        if self._files:
            self._files.touch()
        for start in range(0, len(numbers), _AT_ONCE):
            part = list(numbers[start : start + _AT_ONCE])
            with self._node.waiting():
                shards = self._shards_of(part)
                messages = self._batches.get(part, partial(self._fetch, shards))
            for number in part:
                yield self._decoded(shards, number, messages[number])

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Put record batches into the cache, with their neighbours if the cache holds the whole
        split.

        A `FetchingStore` keeps whole files itself: fetch the files that contain the record batches.
        """
        if isinstance(self._store, FetchingStore):
            names = dict.fromkeys(self._infos[self._shard_of(number)].file for number in numbers)
            for _ in self._node.threads_ahead.map(self._store.fetch, names):
                pass
        files = self._files
        if files is None or files.cache.is_paused:
            return
        missing = [number for number in numbers if not os.path.exists(files.batch(number))]
        if missing:
            shards = self._shards_of(missing)
            runs = dict.fromkeys(map(self._run, missing))
            for _ in self._node.threads_ahead.map(partial(self._fetch_run, shards), runs):
                pass

    def _decoded(self, shards: Shards, number: int, message: bytes) -> tuple[Rows, int]:
        shard = self._shard_of(number)
        info, reader = self._infos[shard], shards[shard].ranged
        index = self._index(number)
        try:
            rows, first_row = reader.rows(index, message)
        except ShardFormatError:
            message = self._batches.again(number, partial(self._fetch, shards))
            rows, first_row = reader.rows(index, message)  # raises if the store has it so
            _log.warning(DAMAGED, reader.expected.path, f"record batch {index}")
        return rows, first_row + self._row_ends[shard] - info.rows

    def _shards_of(self, numbers: Iterable[int]) -> Shards:
        """Return the shards of record batches, with their footers."""
        return self._shards.get(map(self._shard_of, numbers))

    def _fetch(self, shards: Shards, number: int) -> bytes:
        return self._shards.read(shards[self._shard_of(number)], self._index(number), 1)

    def _fetch_run(self, shards: Shards, run: tuple[int, int]) -> None:
        """Put neighbouring record batches into the cache, unless another process is fetching
        them."""
        files, (first, count) = self._files, run
        assert files
        with files.lock(first, count) as is_mine:
            numbers = range(first, first + count)
            wanted = [n for n in numbers if is_mine and not os.path.exists(files.batch(n))]
            if not wanted:
                return
            shard = self._shard_of(first)
            part = self._index(wanted[0]), wanted[-1] + 1 - wanted[0]
            data = self._shards.read(shards[shard], *part)
            messages = shards[shard].ranged.cut(*part, data)
            for number in wanted:
                files.cache.write(files.batch(number), messages[number - wanted[0]])

    def _run(self, number: int) -> tuple[int, int]:
        """Return the first record batch of the request that includes `number`, and their count."""
        settings = self._node.settings
        if settings is None or not settings.is_whole:
            return number, 1
        shard, index = self._shard_of(number), self._index(number)
        info = self._infos[shard]
        length = max(1, _RUN_BYTES * info.batches // info.bytes)
        first = index // length * length
        return number - index + first, min(length, info.batches - first)

    def _shard_of(self, number: int) -> int:
        return bisect_right(self._batch_ends, number)

    def _index(self, number: int) -> int:
        """Return the index of a record batch in its shard."""
        shard = self._shard_of(number)
        return number - self._batch_ends[shard] + self._infos[shard].batches


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
        self._changed = threading.Condition()
        self._ahead: Ahead | None = None
        self._done: Position | None = None
        threading.Thread(target=self._run, name="tokenfeed prefetches", daemon=True).start()

    def follow(self, ahead: Ahead) -> None:
        """Set the current window."""
        with self._changed:
            if self._ahead and ahead.position < self._ahead.position:
                self._done = None  # the loader went back: start again from there
            self._ahead = ahead
            self._changed.notify()

    def _run(self) -> None:
        seen: Ahead | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ahead is not seen)  # noqa: B023
                seen = self._ahead
            assert seen
            self._fetch_after(seen)

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


class Remote:
    """What the remote sources of a reader share: one cache and one prefetching thread."""

    def __init__(self, cache: CacheSettings | None) -> None:
        """Without a cache, nothing is prefetched."""
        self._node = Node(cache)
        self._sources: list[RemoteBatches] = []
        self._prefetcher: Prefetcher | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A pickled copy, as a worker gets it, has its own thread."""
        return self.__dict__ | {"_prefetcher": None}

    def open(self, source: OpenedSplit, number: int, only: Collection[str] | None) -> RemoteBatches:
        """Return the record batches of a source; see `RemoteBatches`."""
        self._sources.append(RemoteBatches(source, number, only, self._node))
        return self._sources[-1]

    @property
    def fetched(self) -> Fetched:
        """Counts of this process's reads from all stores."""
        return sum((source.fetched for source in self._sources), self._node.counted)

    def begin(self, ahead: Ahead | None) -> None:
        """Set the current window. The cache evicts the record batches that the plan reads last
        after this window."""
        self._node.ahead = ahead

    def go_on(self, fetch: Callable[[np.ndarray], None]) -> None:
        """Start prefetching the next windows in a thread, with `fetch`."""
        ahead, settings = self._node.ahead, self._node.settings
        if ahead is None or settings is None:
            return
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(fetch, settings.windows_ahead)
        self._prefetcher.follow(ahead)
