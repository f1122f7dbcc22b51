"""The record batches of one split of one data set, decoded from files in a folder."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.shard import ShardReader

__all__ = ["LocalBatches", "OpenShards", "SplitBatches"]

_OPEN_SHARDS = 256
"""Shards kept open. Opening a shard costs a third of the time to read a record batch."""


class SplitBatches(Protocol):
    """The record batches of a split, by number."""

    def read(self, numbers: Sequence[int]) -> Iterator[tuple[Rows, int]]:
        """Decode record batches lazily. Yield the rows of each, and the number of its first row in
        the split.

        Raises:
            ShardFormatError: A shard or record batch is missing, unreadable or damaged. The message
                names it.
        """
        ...

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Prefetch record batches into the cache."""
        ...


class OpenShards:
    """The most recently read shards of all local sources. A process may open only a limited number
    of files."""

    def __init__(self) -> None:
        self._readers: OrderedDict[tuple[str, str], ShardReader] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """A pickled copy, as a worker gets it, opens its own files."""
        return {"_readers": OrderedDict()}

    def reader(self, source: OpenedSplit, shard: int, only: Collection[str] | None) -> ShardReader:
        """Return the reader of a shard; open the shard if necessary."""
        info = source.split.shards[shard]
        key = source.name, info.file
        if key not in self._readers:
            if len(self._readers) >= _OPEN_SHARDS:
                self._readers.popitem(last=False)
            self._readers[key] = ShardReader.open(source.store, source.manifest, info, only=only)
        self._readers.move_to_end(key)
        return self._readers[key]


class LocalBatches:
    """Record batches of shards in a local folder or a store without ranged reads."""

    def __init__(
        self, source: OpenedSplit, only: Collection[str] | None, opened: OpenShards
    ) -> None:
        """Open nothing yet. `only` names the columns to read; None for all."""
        self._source = source
        self._only = only
        self._opened = opened
        self._batch_ends = list(accumulate(info.batches for info in source.split.shards))
        self._row_ends = list(accumulate(info.rows for info in source.split.shards))

    def read(self, numbers: Sequence[int]) -> Iterator[tuple[Rows, int]]:
        """Decode record batches, one after the other."""
        return map(self._decoded, numbers)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Do nothing: the operating system caches local files."""

    def _decoded(self, number: int) -> tuple[Rows, int]:
        shard = bisect_right(self._batch_ends, number)
        info = self._source.split.shards[shard]
        reader = self._opened.reader(self._source, shard, self._only)
        rows, first_row = reader.read(number - self._batch_ends[shard] + info.batches)
        return rows, first_row + self._row_ends[shard] - info.rows
