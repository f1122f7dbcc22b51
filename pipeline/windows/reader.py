"""Read a window: several record batches, from any shards of any sources, decoded together.

`Joiner` copies each record batch into the window as soon as it is decoded, so the batches are never
all in memory twice. Every window reuses the memory of the window before: the kernel does not have
to map new pages. Torch-free.
"""

import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of, ranges
from tokenfeed.pipeline.format.data_set import OpenedSplit, has_remote
from tokenfeed.pipeline.format.schema import INPUT_IDS, KINDS, Rows
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.format.store import RangedStore
from tokenfeed.pipeline.planning.plan import Ahead

if TYPE_CHECKING:
    from tokenfeed.pipeline.caching.node import Fetched, Node
    from tokenfeed.pipeline.caching.node_cache import CacheSettings
    from tokenfeed.pipeline.windows.remote_batches import RemoteBatches


_OPEN_SHARDS = 256
"""Shards kept open. Opening a shard costs a third of the time to read a record batch."""


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
        """Yield the rows of each record batch, and the number of its first row in the split."""
        return map(self._decoded, numbers)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Do nothing: the operating system caches local files."""

    def _decoded(self, number: int) -> tuple[Rows, int]:
        shard = bisect_right(self._batch_ends, number)
        info = self._source.split.shards[shard]
        reader = self._opened.reader(self._source, shard, self._only)
        rows, first_row = reader.read(number - self._batch_ends[shard] + info.batches)
        return rows, first_row + self._row_ends[shard] - info.rows


_ROOM, _GROWTH = 1.25, 1.5
"""Factors of an array's size: over the expected size, because parts differ; and when it grows.
Memory that is never written is not allocated by the kernel."""


class Joiner:
    """Joins parts to one `Rows`, repeatedly, in reused memory. For one thread. A pickled copy has
    its own memory."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}

    def __reduce__(self) -> "tuple[type[Joiner], tuple[()]]":
        return Joiner, ()

    def join(self, parts: Iterable[Rows], count: int) -> Rows:
        """Join the parts, in order.

        Args:
            parts: At least one. All have the same columns. Each part is copied when it is produced.
            count: Expected number of parts of about the same size. If there are more, or larger
                ones, the rows are copied once more.
        """
        for column in self._columns.values():
            column.begin()
        for part in parts:
            self._append({"": part.lengths}, count)
            self._append(part.per_token, count)
            self._append(part.per_row, count)
        columns = self._columns
        return Rows(
            columns[""].whole(),
            {name: columns[name].whole() for name in part.per_token},
            {name: columns[name].whole() for name in part.per_row},
        )

    def _append(self, columns: Mapping[str, np.ndarray], count: int) -> None:
        for name, values in columns.items():
            if name not in self._columns:
                self._columns[name] = _Column(values.dtype)
            self._columns[name].append(values, count)


class _Column:
    """An array that grows. Its memory is reused as soon as no view of it exists."""

    def __init__(self, dtype: np.dtype) -> None:
        self._size = 0
        self._allocate(0, dtype)

    def begin(self) -> None:
        """Start an empty array. Arrays returned before keep their content."""
        self._size = 0
        if self._references() > self._own_references:
            self._allocate(0, self._memory.dtype)

    def append(self, values: np.ndarray, count: int) -> None:
        end = self._size + len(values)
        if end > len(self._memory):
            before = self.whole()
            room = _GROWTH * end if self._size else _ROOM * count * len(values)
            self._allocate(int(room), values.dtype)
            self._memory[: self._size] = before
        self._memory[self._size : end] = values
        self._size = end

    def whole(self) -> np.ndarray:
        return self._memory[: self._size]

    def _allocate(self, room: int, dtype: np.dtype) -> None:
        self._memory = np.empty(room, dtype)
        self._own_references = self._references()

    def _references(self) -> int:
        """Return the number of references to the memory; every view of it holds one."""
        return sys.getrefcount(self._memory)


@dataclass(frozen=True, slots=True)
class Window:
    """Decoded rows and their numbers."""

    rows: Rows
    numbers: np.ndarray
    """Number of each row, counted over all sources, shape (R,), int64."""


class WindowReader:
    """Decodes record batches of the sources of a plan."""

    def __init__(
        self,
        sources: tuple[OpenedSplit, ...],
        *,
        whole_rows: bool = False,
        with_kinds: bool = False,
        cache: "CacheSettings | None" = None,
    ) -> None:
        """Open nothing yet.

        Args:
            sources: The sources; record batches and rows are numbered in this order.
            whole_rows: Whether to read all columns, or only the ids and the columns of the task.
            with_kinds: Whether to read the kinds of the tokens of conversations too.
            cache: Settings of the node cache for data from stores; None for no cache.
        """
        self.columns = sources[0].manifest.columns
        """Columns of the data sets."""
        names = (column.name for column in self.columns)
        wanted = (INPUT_IDS, *(name for name in names if with_kinds or name != KINDS))
        only = None if whole_rows else wanted
        self._batch_starts = offsets_of(np.array([source.batches for source in sources]))
        self._row_starts = offsets_of(np.array([source.rows for source in sources])).tolist()
        self._names = [source.name for source in sources]
        self._node: Node | None = None
        if has_remote(sources):
            from tokenfeed.pipeline.caching import node

            self._node = node.Node(cache)
        opened = OpenShards()
        self._sources = [self._batches_of(source, only, opened) for source in sources]
        self._joiner = Joiner()

    @property
    def fetched(self) -> "Fetched | None":
        """Counts of this process's reads from stores; None if all sources are local."""
        return self._node.fetched if self._node else None

    def read(self, batches: np.ndarray, ahead: Ahead | None = None) -> Window:
        """Decode record batches, counted over all sources.

        Args:
            batches: Numbers of the record batches, shape (K,).
            ahead: The plan and its current window, for prefetching from stores.

        Raises:
            ShardFormatError: A shard or record batch is missing, unreadable or damaged. The message
                names it.
            RemoteError: A store cannot be reached or refuses the request.
        """
        if self._node:
            self._node.ahead = ahead
        numbers: list[tuple[int, int]] = []
        rows = self._joiner.join(self._decoded(batches, numbers), len(batches))
        if self._node:
            self._node.prefetch(self._prefetch)
        firsts, sizes = np.array(numbers).T
        return Window(rows, ranges(firsts, sizes))

    def name_of_row(self, number: int) -> str:
        """Return the name of a row in messages, from its number over all sources."""
        source = bisect_right(self._row_starts, number) - 1
        of_source = f" of {self._names[source]}" if len(self._names) > 1 else ""
        return f"row {number - self._row_starts[source]}{of_source}"

    def _batches_of(
        self, source: OpenedSplit, only: tuple[str, ...] | None, opened: OpenShards
    ) -> "LocalBatches | RemoteBatches":
        if self._node is None or not isinstance(source.store, RangedStore):
            return LocalBatches(source, only, opened)
        from tokenfeed.pipeline.windows.remote_batches import RemoteBatches

        return RemoteBatches(source, only, self._node)

    def _decoded(self, batches: np.ndarray, numbers: list[tuple[int, int]]) -> Iterator[Rows]:
        """Yield the rows of each record batch. Append the number of the first, over all sources,
        and the number of rows to `numbers`."""
        for source, own in self._by_source(batches):
            # a source of few record batches may repeat them very often in a window of a mixture
            times = [(number, sum(1 for _ in same)) for number, same in groupby(own)]
            decoded = self._sources[source].read([number for number, _ in times])
            for (rows, first_row), (_, count) in zip(decoded, times, strict=True):
                numbers += repeat((first_row + self._row_starts[source], len(rows)), count)
                yield from repeat(rows, count)

    def _by_source(self, batches: np.ndarray) -> Iterator[tuple[int, list[int]]]:
        """Yield runs of record batches of one source: the source, and their numbers in it."""
        sources = np.searchsorted(self._batch_starts, batches, side="right") - 1
        edges = np.flatnonzero(np.diff(sources)) + 1
        for part in np.split(np.arange(len(batches)), edges):
            source = int(sources[part[0]])
            yield source, (batches[part] - self._batch_starts[source]).tolist()

    def _prefetch(self, batches: np.ndarray) -> None:
        for source, numbers in self._by_source(batches):
            self._sources[source].prefetch(numbers)
