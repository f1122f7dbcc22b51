"""Do one unit of a shuffle: scatter record batches to a partition, or gather shards from all.

What is written depends on the data set, the seed and the layout alone, so it is the same whoever
does it, and a unit that was interrupted is simply done again. Rows are handled by the million;
nothing here touches a single one in Python.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np

from tokenfeed.pipeline.errors import ShardFormatError
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.manifest import FileInfo, Manifest, ShardInfo
from tokenfeed.pipeline.format.rows import Picker, Rows
from tokenfeed.pipeline.format.schema import shard_schema
from tokenfeed.pipeline.format.shard import ShardWriter
from tokenfeed.pipeline.format.store import Store
from tokenfeed.pipeline.windows.reader import Window, WindowReader
from tokenfeed.tools.shuffling.buffer import RowBuffer
from tokenfeed.tools.shuffling.layout import Gather, Layout, Scatter, SplitLayout
from tokenfeed.tools.shuffling.partition import (
    Columns,
    Placed,
    read_section,
    write_partition,
)

__all__ = ["PARTITIONS", "Done", "Shuffle"]

PARTITIONS = ".partitions"
"""Folder of temporary files below the output folder."""
_SLICE_TOKENS = 1 << 20
"""A writer is given so many at once: it joins what it is given with what it still has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What is kept of a finished unit."""

    unit: int
    partition: FileInfo | None = None
    """Of the first pass. Whether it is still whole is asked where the second pass needs it."""
    shards: tuple[ShardInfo, ...] = ()
    """Of the second pass."""

    @property
    def files(self) -> tuple[FileInfo, ...]:
        """What must be as it was left for the unit to count."""
        return self.shards


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffle:
    """What every worker must know, whichever unit it gets."""

    sources: dict[str, OpenedSplit]
    """Every split with rows of the data set to shuffle."""
    manifest: Manifest
    """Its manifest."""
    folder: Path
    """The output folder."""
    layout: Layout
    compresses: bool
    """Whether partitions are to be small; they are made and read faster as they are."""

    @classmethod
    def from_manifest(
        cls, source: Store, manifest: Manifest, out: Path, layout: Layout, *, compresses: bool
    ) -> Self:
        """What shuffles the data set of `source` into `out`."""
        sources = {
            name: OpenedSplit.from_manifest(source, manifest, manifest.splits[name])
            for name in layout.splits
        }
        return cls(
            sources=sources, manifest=manifest, folder=out, layout=layout, compresses=compresses
        )

    def begin(
        self, on_progress: Callable[[float, int], None]
    ) -> Callable[[Scatter | Gather], Done]:
        """What does a unit."""
        return _Shuffler(self, on_progress).do


class _Shuffler:
    """Does units, one after the other; has one bucket in memory at a time."""

    def __init__(self, shuffle: Shuffle, on_progress: Callable[[float, int], None]) -> None:
        self._shuffle = shuffle
        self._on_progress = on_progress
        manifest = shuffle.manifest
        self._vocabulary_size = manifest.tokenizer.vocabulary_size
        self._columns = Columns.from_schema(shard_schema(self._vocabulary_size, manifest.columns))
        self._buffer = RowBuffer()
        self._readers = {
            name: WindowReader((source,), whole_rows=True)
            for name, source in shuffle.sources.items()
        }

    def do(self, unit: Scatter | Gather) -> Done:
        return self._scatter(unit) if isinstance(unit, Scatter) else self._gather(unit)

    def _scatter(self, unit: Scatter) -> Done:
        split = self._shuffle.layout.splits[unit.split]
        first, rows = self._read(unit, split)
        places = split.permutation.places(np.arange(first, first + len(rows)))
        info = write_partition(
            self._shuffle.folder,
            _partition_name(unit.number),
            _sections(rows, places, split.bucket_edges),
            self._columns,
            compressed=self._shuffle.compresses,
        )
        return Done(unit=unit.number, partition=info)

    def _read(self, unit: Scatter, split: SplitLayout) -> tuple[int, Rows]:
        """The number of a unit's first row, and its rows."""
        part = (unit.stop - unit.start) / split.num_batches
        windows = self._windows(unit)
        first = next(windows)
        parts = chain([first.rows], (window.rows for window in windows))
        expected = {"num_rows": part * split.rows, "num_tokens": part * split.tokens}
        return int(first.numbers[0]), self._buffer.join(parts, **expected)

    def _windows(self, unit: Scatter) -> Iterator[Window]:
        """Its record batches, one after the other."""
        weight_bytes = unit.weight_bytes / (unit.stop - unit.start)
        for batch in range(unit.start, unit.stop):
            window = self._readers[unit.split].read(np.array([batch]))
            self._on_progress(weight_bytes, len(window.rows.ids))
            yield window

    def _gather(self, unit: Gather) -> Done:
        split = self._shuffle.layout.splits[unit.split]
        first, end = split.group_edges[unit.group : unit.group + 2].tolist()
        num_rows = int(split.shard_edges[end] - split.shard_edges[first])
        source = _BucketSource(self._shuffle, unit, self._columns, self._buffer)
        infos = []
        for shard in range(first, end):
            name = f"{unit.split}/{shard:05d}.arrow"
            columns = self._shuffle.manifest.columns
            with ShardWriter(self._shuffle.folder, name, self._vocabulary_size, columns) as writer:
                for rows in source.rows(*split.shard_edges[shard : shard + 2].tolist()):
                    writer.append(rows)
                    self._on_progress(unit.weight_bytes * len(rows) / num_rows, len(rows.ids))
            assert writer.info is not None
            infos.append(writer.info)
        return Done(unit=unit.number, shards=tuple(infos))


def _sections(rows: Rows, places: np.ndarray, edges: np.ndarray) -> Iterator[Placed]:
    """The rows of each bucket; as many buckets are gathered at once as a slice holds."""
    order = np.argsort(places)
    places = places[order]
    cuts = np.searchsorted(places, edges)
    picker = Picker(rows)
    at_once = max(1, len(edges) * _SLICE_TOKENS // len(rows.ids))
    for first in range(0, len(edges) - 1, at_once):
        these = cuts[first : first + at_once + 1]
        parts = picker.take(order[these[0] : these[-1]]).parts(these - these[0])
        for part, start, edge in zip(parts, these.tolist(), edges[first:].tolist(), strict=False):
            yield Placed(part, places[start : start + len(part)] - edge)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket as it was read, and where each of its places is."""

    number: int
    rows: Picker
    order: np.ndarray
    """The row that belongs in each place, shape (R,)."""
    slice_rows: int
    """How many are copied at a time."""

    def slices(self, start: int, stop: int) -> Iterator[Rows]:
        """The rows of places `start` up to `stop`."""
        for first in range(start, stop, self.slice_rows):
            yield self.rows.take(self.order[first : min(first + self.slice_rows, stop)])


class _BucketSource:
    """Rows in their new order, from one bucket after the other."""

    def __init__(self, shuffle: Shuffle, unit: Gather, columns: Columns, buffer: RowBuffer) -> None:
        self._split = shuffle.layout.splits[unit.split]
        self._columns = columns
        self._buffer = buffer
        self._partitions = [
            shuffle.folder / _partition_name(scatter.number)
            for scatter in shuffle.layout.scatters
            if scatter.split == unit.split
        ]
        self._bucket: _Bucket | None = None

    def rows(self, start: int, stop: int) -> Iterator[Rows]:
        """Those of the new places `start` up to `stop`, in slices."""
        edges = self._split.bucket_edges
        first = int(np.searchsorted(edges, start, side="right")) - 1
        for number in range(first, int(np.searchsorted(edges, stop))):
            begin, end = edges[number : number + 2].tolist()
            if begin < end:
                wanted = max(start, begin) - begin, min(stop, end) - begin
                yield from self._opened(number).slices(*wanted)

    def _opened(self, number: int) -> _Bucket:
        if self._bucket is None or self._bucket.number != number:
            self._bucket = self._read(number)
        return self._bucket

    def _read(self, number: int) -> _Bucket:
        split = self._split
        size = int(np.diff(split.bucket_edges[number : number + 2])[0])
        places: list[np.ndarray] = []
        rows = self._buffer.join(
            self._sections(number, places),
            num_rows=size,
            num_tokens=size / split.rows * split.tokens,
        )
        if len(rows) != size:
            raise ShardFormatError(
                f"{self._partitions[0].parent}: holds {len(rows):,} rows of bucket {number}, "
                f"expected {size:,}. Delete the folder and repeat the command."
            )
        order = np.empty(size, np.int64)
        order[np.concatenate(places)] = np.arange(size)
        slice_rows = max(1, size * _SLICE_TOKENS // len(rows.ids))
        return _Bucket(number, Picker(rows), order, slice_rows)

    def _sections(self, number: int, places: list[np.ndarray]) -> Iterator[Rows]:
        """The rows of a bucket, a partition after the other; adds where they belong to `places`."""
        for path in self._partitions:
            placed = read_section(path, number, self._split.num_buckets, self._columns)
            places.append(placed.places)
            yield placed.rows


def _partition_name(number: int) -> str:
    return f"{PARTITIONS}/{number:05d}"
