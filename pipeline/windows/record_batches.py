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
"""Windows come back to the same shards; to open one costs a third of reading a record batch."""


class SplitBatches(Protocol):
    """Record batches by their number within the split."""

    def read(self, numbers: Sequence[int]) -> Iterator[tuple[Rows, int]]:
        """Decode some, each when it is asked for: its rows, and the number of its first row within
        the split.

        Raises:
            ShardFormatError: A shard or batch is missing, unreadable or damaged; names it.
        """
        ...

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Bring some nearer, which will be read."""
        ...


class OpenShards:
    """The shards that were read last, of all local sources: files are few that a process may
    open."""

    def __init__(self) -> None:
        self._readers: OrderedDict[tuple[str, str], ShardReader] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, as a worker gets it, opens for itself."""
        return {"_readers": OrderedDict()}

    def reader(self, source: OpenedSplit, shard: int, only: Collection[str] | None) -> ShardReader:
        """The reader of a shard of a source."""
        info = source.split.shards[shard]
        key = source.name, info.file
        if key not in self._readers:
            if len(self._readers) >= _OPEN_SHARDS:
                self._readers.popitem(last=False)
            self._readers[key] = ShardReader.open(source.store, source.manifest, info, only=only)
        self._readers.move_to_end(key)
        return self._readers[key]


class LocalBatches:
    """Of shards that are opened like files."""

    def __init__(
        self, source: OpenedSplit, only: Collection[str] | None, opened: OpenShards
    ) -> None:
        """Open nothing yet; `only` these columns are read, or all."""
        self._source = source
        self._only = only
        self._opened = opened
        self._batch_ends = list(accumulate(info.batches for info in source.split.shards))
        self._row_ends = list(accumulate(info.rows for info in source.split.shards))

    def read(self, numbers: Sequence[int]) -> Iterator[tuple[Rows, int]]:
        """Decode some, one after the other."""
        return map(self._decoded, numbers)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Nothing: the system keeps what a disk has read."""

    def _decoded(self, number: int) -> tuple[Rows, int]:
        shard = bisect_right(self._batch_ends, number)
        info = self._source.split.shards[shard]
        reader = self._opened.reader(self._source, shard, self._only)
        rows, first_row = reader.read(number - self._batch_ends[shard] + info.batches)
        return rows, first_row + self._row_ends[shard] - info.rows
