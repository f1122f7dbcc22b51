"""Do one unit of a shuffle: scatter record batches to a partition, or gather shards from all.

What is written depends on the data set, the seed and the layout alone, so it is the same whoever
does it, and a unit that was interrupted is simply done again. Rows are handled by the million;
nothing here touches a single one in Python.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from tokenfeed.pipeline.errors import ShardFormatError
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.manifest import FileInfo, Manifest, ShardInfo
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.schema import shard_schema
from tokenfeed.pipeline.format.shard import ShardWriter
from tokenfeed.pipeline.windows.reader import WindowReader
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

    @classmethod
    def from_manifest(cls, folder: Path, manifest: Manifest, out: Path, layout: Layout) -> Self:
        """The recipe of shuffling the data set in `folder` into `out`."""
        sources = {
            name: OpenedSplit.from_manifest(folder, manifest, manifest.splits[name])
            for name in layout.splits
        }
        return cls(sources=sources, manifest=manifest, folder=out, layout=layout)

    def begin(
        self, on_progress: Callable[[float, int], None]
    ) -> Callable[[Scatter | Gather], Done]:
        """What does a unit."""
        return _Shuffler(self, on_progress).do


class _Shuffler:
    """Does units, one after the other; has one bucket in memory at a time."""

    def __init__(self, recipe: Shuffle, on_progress: Callable[[float, int], None]) -> None:
        self._job = recipe
        self._on_progress = on_progress
        manifest = recipe.manifest
        self._vocabulary_size = manifest.tokenizer.vocabulary_size
        self._columns = Columns.from_schema(shard_schema(self._vocabulary_size, manifest.columns))
        self._readers = {name: WindowReader((source,)) for name, source in recipe.sources.items()}

    def do(self, unit: Scatter | Gather) -> Done:
        return self._scatter(unit) if isinstance(unit, Scatter) else self._gather(unit)

    def _scatter(self, unit: Scatter) -> Done:
        split = self._job.layout.splits[unit.split]
        rows, positions = self._read(unit, split)
        edges = split.bucket_edges
        buckets = np.searchsorted(edges, positions, side="right") - 1
        width = np.uint16 if len(edges) <= 1 << 16 else np.int64  # numpy sorts uint16 by counting
        order = np.argsort(buckets.astype(width), kind="stable")
        buckets, places = buckets[order], (positions - edges[buckets])[order]
        info = write_partition(
            self._job.folder,
            _partition_name(unit.number),
            Placed(rows.take(order), places),
            np.searchsorted(buckets, np.arange(len(edges))),
            self._columns,
        )
        return Done(unit=unit.number, partition=info)

    def _read(self, unit: Scatter, split: SplitLayout) -> tuple[Rows, np.ndarray]:
        """The rows of a unit, and their new places."""
        parts, numbers = [], []
        for batch in range(unit.start, unit.stop):
            window = self._readers[unit.split].read(np.array([batch]))
            parts.append(window.rows)
            numbers.append(window.numbers)
            self._on_progress(unit.weight_bytes / (unit.stop - unit.start), len(window.rows.ids))
        return Rows.concatenate(parts), split.positions(np.concatenate(numbers))

    def _gather(self, unit: Gather) -> Done:
        split = self._job.layout.splits[unit.split]
        first, end = split.group_edges[unit.group : unit.group + 2].tolist()
        num_rows = int(split.shard_edges[end] - split.shard_edges[first])
        source = _BucketSource(self._job, unit, self._columns)
        infos = []
        for shard in range(first, end):
            name = f"{unit.split}/{shard:05d}.arrow"
            columns = self._job.manifest.columns
            with ShardWriter(self._job.folder, name, self._vocabulary_size, columns) as writer:
                for rows in source.rows(*split.shard_edges[shard : shard + 2].tolist()):
                    writer.append(rows)
                    self._on_progress(unit.weight_bytes * len(rows) / num_rows, len(rows.ids))
            assert writer.info is not None
            infos.append(writer.info)
        return Done(unit=unit.number, shards=tuple(infos))


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket as it was read, and where each of its places is."""

    number: int
    rows: Rows
    order: np.ndarray
    """The row that belongs in each place, shape (R,)."""

    def slices(self, start: int, stop: int) -> Iterator[Rows]:
        """The rows of places `start` up to `stop`, copied so many tokens at a time."""
        ends = np.cumsum(self.rows.lengths[self.order[start:stop]])
        goals = np.arange(_SLICE_TOKENS, int(ends[-1]), _SLICE_TOKENS)
        cuts = np.unique([start, *(start + 1 + np.searchsorted(ends, goals)), stop])
        for first, end in pairwise(cuts.tolist()):
            yield self.rows.take(self.order[first:end])


class _BucketSource:
    """Rows in their new order, from one bucket after the other."""

    def __init__(self, recipe: Shuffle, unit: Gather, columns: Columns) -> None:
        self._split = recipe.layout.splits[unit.split]
        self._columns = columns
        self._partitions = [
            recipe.folder / _partition_name(scatter.number)
            for scatter in recipe.layout.scatters
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
            self._bucket = None  # room for the next
            self._bucket = self._read(number)
        return self._bucket

    def _read(self, number: int) -> _Bucket:
        num_buckets = len(self._split.bucket_edges) - 1
        parts = [
            read_section(path, number, num_buckets, self._columns) for path in self._partitions
        ]
        places = np.concatenate([part.places for part in parts])
        size = int(np.diff(self._split.bucket_edges[number : number + 2])[0])
        if len(places) != size:
            raise ShardFormatError(
                f"{self._partitions[0].parent}: holds {len(places):,} rows of bucket {number}, "
                f"expected {size:,}. Delete the folder and repeat the command."
            )
        order = np.empty(size, np.int64)
        order[places] = np.arange(size)
        return _Bucket(number, Rows.concatenate([part.rows for part in parts]), order)


def _partition_name(number: int) -> str:
    return f"{PARTITIONS}/{number:05d}"
