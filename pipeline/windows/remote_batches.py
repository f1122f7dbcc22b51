"""The record batches of sources in stores: each in one request, by way of the node's cache."""

import logging
import os
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import xxhash

from tokenfeed.pipeline.caching.node import Node, SharedPieces
from tokenfeed.pipeline.errors import ShardFormatError
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.store import FetchingStore, RangedStore
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
        node.stores.append(self._store)
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
