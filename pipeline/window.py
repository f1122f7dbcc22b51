"""A window: several record batches decoded together, and one rank's share of it, gathered.

The share is what a loader worker sends: ids in storage dtype, already in the order of delivery, and
a few index arrays, in two flat buffers. So the price of crossing processes is paid per window, not
per batch or row.
"""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenfeed.pipeline.batching import Share, WindowPlan
from tokenfeed.pipeline.manifest import Manifest
from tokenfeed.pipeline.ragged import take
from tokenfeed.pipeline.rows import Rows
from tokenfeed.pipeline.shard import ShardReader

__all__ = ["ShareArrays", "SplitReader", "gather"]

_OPEN_SHARDS = 64


@dataclass(frozen=True, slots=True)
class ShareArrays:
    """One rank's share of a window: its micro-batches one after the other."""

    ids: np.ndarray
    """Tokens in the order of delivery, shape (N,), uint16 or uint32."""
    piece_rows: np.ndarray
    """Row of the split each piece is cut from, shape (P,), int64; -1 in a filler."""
    piece_starts: np.ndarray
    """First token of the piece within its row, shape (P,), int64."""
    piece_lengths: np.ndarray
    """Tokens of each piece, shape (P,), int64."""
    sequence_offsets: np.ndarray
    """Where each sequence begins among the pieces, shape (S + 1,), int64."""
    batch_offsets: np.ndarray
    """Where each micro-batch begins among the sequences, shape (M + 1,), int64."""


class SplitReader:
    """Decodes any record batches of one split; keeps the most recent shards open."""

    def __init__(self, folder: Path, manifest: Manifest, split: str) -> None:
        self._folder = folder
        self._shards = manifest.split(split).shards
        self._manifest = manifest
        self._batch_ends = np.cumsum([shard.batches for shard in self._shards])
        self._row_ends = np.cumsum([shard.rows for shard in self._shards])
        self._open: OrderedDict[int, ShardReader] = OrderedDict()

    def read(self, batches: np.ndarray) -> tuple[Rows, np.ndarray]:
        """Decode record batches, counted over the whole split.

        Returns:
            Their rows, one batch after the other, and the row's number within the split, (R,).

        Raises:
            ShardFormatError: A shard or batch is missing or damaged; names it.
        """
        parts, numbers = [], []
        for batch in batches.tolist():
            shard = int(np.searchsorted(self._batch_ends, batch, side="right"))
            info = self._shards[shard]
            index = batch - int(self._batch_ends[shard]) + info.batches
            rows, first_row = self._reader(shard).read(index)
            parts.append(rows)
            first_row += int(self._row_ends[shard]) - info.rows
            numbers.append(np.arange(first_row, first_row + len(rows)))
        return Rows.concatenate(parts), np.concatenate(numbers)

    def _reader(self, shard: int) -> ShardReader:
        if shard not in self._open:
            if len(self._open) >= _OPEN_SHARDS:
                self._open.popitem(last=False)
            self._open[shard] = ShardReader.open(self._folder, self._manifest, self._shards[shard])
        self._open.move_to_end(shard)
        return self._open[shard]


def gather(rows: Rows, row_numbers: np.ndarray, plan: WindowPlan, share: Share) -> ShareArrays:
    """Copy one rank's pieces out of a decoded window, in the order of delivery."""
    pieces = share.pieces
    starts = plan.piece_offsets[:-1][pieces]
    source = plan.piece_rows[pieces]
    row_starts = np.cumsum(rows.lengths) - rows.lengths
    numbers = row_numbers[source]
    numbers[_pieces_of(share, share.filler)] = -1
    return ShareArrays(
        ids=take(rows.ids, plan.piece_offsets, pieces),
        piece_rows=numbers,
        piece_starts=starts - row_starts[source],
        piece_lengths=plan.piece_offsets[1:][pieces] - starts,
        sequence_offsets=share.sequence_offsets,
        batch_offsets=share.batch_offsets,
    )


def _pieces_of(share: Share, batches: np.ndarray) -> np.ndarray:
    """Which pieces belong to the marked micro-batches, shape (P,), bool."""
    piece_offsets = share.sequence_offsets[share.batch_offsets]
    return np.repeat(batches, np.diff(piece_offsets))
