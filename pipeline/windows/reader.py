"""Reading a window: several record batches, from any shards of any sources, decoded together."""

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from tokenfeed.pipeline.arithmetic import ranges
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.schema import INPUT_IDS
from tokenfeed.pipeline.format.shard import ShardReader

__all__ = ["Window", "WindowReader"]

_OPEN_SHARDS = 256
"""Windows come back to the same shards; to open one costs a third of reading a record batch."""
_KEPT_TOKENS = 1 << 20
"""Sources of no more, all together, are decoded once: a few MB, and epochs of milliseconds."""


@dataclass(frozen=True, slots=True)
class Window:
    """Decoded rows, and which they are."""

    rows: Rows
    numbers: np.ndarray
    """Number of each row within all sources, one after the other, shape (R,), int64."""


class WindowReader:
    """Decodes any record batches of some sources; keeps the most recent shards open, and of small
    sources all that it has decoded."""

    def __init__(self, sources: tuple[OpenedSplit, ...], *, whole_rows: bool = False) -> None:
        """Open nothing yet. Of each row the ids and the task's columns are read, or all columns."""
        self._shards = [(source, info) for source in sources for info in source.split.shards]
        self._batch_ends = list(accumulate(info.batches for _, info in self._shards))
        self._row_ends = list(accumulate(info.rows for _, info in self._shards))
        wanted = (INPUT_IDS, *(column.name for column in sources[0].manifest.columns))
        self._only = None if whole_rows else wanted
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._is_small = sum(source.tokens for source in sources) <= _KEPT_TOKENS
        self._kept: dict[int, tuple[Rows, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy, as a worker gets it, opens and decodes for itself."""
        return self.__dict__ | {"_open": OrderedDict(), "_kept": {}}

    def read(self, batches: np.ndarray) -> Window:
        """Decode record batches, counted over all sources.

        Raises:
            ShardFormatError: A shard or batch is missing, unreadable or damaged; names it.
        """
        parts, firsts = zip(*map(self._decoded, batches.tolist()), strict=True)
        numbers = ranges(np.array(firsts), np.array([len(part) for part in parts]))
        return Window(Rows.concatenate(list(parts)), numbers)

    def _decoded(self, batch: int) -> tuple[Rows, int]:
        """A record batch, and the number of its first row within all sources."""
        if batch in self._kept:
            return self._kept[batch]
        shard = bisect_right(self._batch_ends, batch)
        _, info = self._shards[shard]
        rows, first_row = self._reader(shard).read(batch - self._batch_ends[shard] + info.batches)
        decoded = rows, first_row + self._row_ends[shard] - info.rows
        if self._is_small:
            self._kept[batch] = decoded
        return decoded

    def _reader(self, shard: int) -> ShardReader:
        if shard not in self._open:
            if len(self._open) >= _OPEN_SHARDS:
                self._open.popitem(last=False)
            source, info = self._shards[shard]
            self._open[shard] = ShardReader.open(
                source.store, source.manifest, info, only=self._only
            )
        self._open.move_to_end(shard)
        return self._open[shard]
