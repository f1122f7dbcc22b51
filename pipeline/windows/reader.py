"""A window: several record batches decoded together, and one rank's share of it gathered.

The share is what a worker hands over: values in storage dtype, already in the order of delivery,
and a few index arrays. So the price of crossing processes is paid per window, not per batch or row.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenfeed.pipeline.format.ragged import take
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.schema import INPUT_IDS
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.planning.batching import WindowPlan, offsets_of, regroup
from tokenfeed.pipeline.planning.mixture import OpenedSplit
from tokenfeed.pipeline.planning.rounds import Rounds

__all__ = ["Spans", "Window", "WindowReader", "gather"]

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

    def __init__(
        self, sources: tuple[OpenedSplit, ...], columns: tuple[str, ...] | None = None
    ) -> None:
        """Open nothing yet; `columns` are those to read beside the ids, None for all."""
        self._shards = [(source, info) for source in sources for info in source.split.shards]
        self._batch_ends = np.cumsum([info.batches for _, info in self._shards])
        self._row_ends = np.cumsum([info.rows for _, info in self._shards])
        self._only = None if columns is None else (INPUT_IDS, *columns)
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
        numbers = [
            np.arange(first, first + len(part)) for first, part in zip(firsts, parts, strict=True)
        ]
        return Window(Rows.concatenate(list(parts)), np.concatenate(numbers))

    def _decoded(self, batch: int) -> tuple[Rows, int]:
        """A record batch, and the number of its first row within all sources."""
        if batch in self._kept:
            return self._kept[batch]
        shard = int(np.searchsorted(self._batch_ends, batch, side="right"))
        _, info = self._shards[shard]
        rows, first_row = self._reader(shard).read(batch - self._batch_ends[shard] + info.batches)
        decoded = rows, first_row + int(self._row_ends[shard]) - info.rows
        if self._is_small:
            self._kept[batch] = decoded
        return decoded

    def _reader(self, shard: int) -> ShardReader:
        if shard not in self._open:
            if len(self._open) >= _OPEN_SHARDS:
                self._open.popitem(last=False)
            source, info = self._shards[shard]
            self._open[shard] = ShardReader.open(
                source.root, source.manifest, info, only=self._only
            )
        self._open.move_to_end(shard)
        return self._open[shard]


@dataclass(frozen=True, slots=True)
class Spans:
    """What each piece of a window is, in the order of delivery, for all ranks; shape (P,) each."""

    numbers: np.ndarray
    """The row within all sources, int64."""
    starts: np.ndarray | None
    """The first token within the row, int64; None: no row was cut."""
    lengths: np.ndarray
    """Tokens, int32."""

    @classmethod
    def from_window(cls, window: Window, plan: WindowPlan) -> "Spans":
        """The spans of a planned window."""
        cut, pieces = plan.cut, plan.pieces
        lengths = cut.lengths.astype(np.int32)[pieces]
        if cut.cut_from is None:
            return cls(window.numbers[pieces], None, lengths)
        source = cut.cut_from[pieces]
        starts = cut.offsets[pieces] - offsets_of(window.rows.lengths)[source]
        return cls(window.numbers[source], starts, lengths)


def gather(
    window: Window, plan: WindowPlan, rounds: Rounds, spans: Spans
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Copy one rank's micro-batches out of a decoded window, in the order of delivery.

    Returns:
        Values a token, and what stands beside them: both as `RankSlice` documents them.
    """
    batches, sequences, chosen = _pick(plan, rounds)
    pieces = plan.pieces[chosen]
    rows = window.rows
    per_token = {
        name: take(values, plan.cut.offsets, pieces) for name, values in rows.per_token.items()
    }
    index = {"numbers": spans.numbers[chosen], "lengths": spans.lengths[chosen], "batches": batches}
    if spans.starts is not None:
        index["starts"] = spans.starts[chosen]
    if sequences is not None:
        index["sequences"] = sequences
    if rows.per_row:
        source = pieces if plan.cut.cut_from is None else plan.cut.cut_from[pieces]
        index |= {name: values[source] for name, values in rows.per_row.items()}
    return per_token, index


def _pick(
    plan: WindowPlan, rounds: Rounds
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | slice]:
    """This rank's micro-batches and sequences, as offsets, and which of the plan's pieces they are.

    A filler has one sequence.
    """
    if rounds.takes_all:
        return plan.batch_offsets, plan.sequence_offsets, slice(None)
    starts = plan.batch_offsets[:-1][rounds.mine]
    sizes = np.where(rounds.filler, 1, np.diff(plan.batch_offsets)[rounds.mine])
    batches = offsets_of(sizes)
    sequences = np.arange(batches[-1]) + np.repeat(starts - batches[:-1], sizes)
    if plan.sequence_offsets is None:
        return batches, None, sequences
    pieces, offsets = regroup(np.arange(len(plan.pieces)), plan.sequence_offsets, sequences)
    return batches, offsets, pieces
