"""The digest of the delivered rows: one number that two runs can compare.

It is the sum, modulo 2**64, of a hash of (epoch, window, place, rows, spans) of every micro-batch.
The order of summation does not matter, so the digest is the same on every rank, for any number of
ranks and workers. Every term includes the place of its micro-batch, so another order of rows gives
another digest. Torch-free.
"""

from dataclasses import dataclass

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.planning.batching import Rounds, WindowPlan
from tokenfeed.pipeline.planning.order import blocks, derive_key, mix64

__all__ = ["Spans", "digests", "tokens_by_source"]

_ROW, _START, _LENGTH = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xC2B2AE3D27D4EB4F),
    np.uint64(0x165667B19E3779F9),
)


@dataclass(frozen=True, slots=True)
class Spans:
    """Row and token range of each piece of a window, in delivery order; shape (P,) each."""

    numbers: np.ndarray
    """Number of the row over all sources, int64."""
    starts: np.ndarray | None
    """First token of the piece in its row, int64; None: no row was cut."""
    lengths: np.ndarray
    """Tokens, int32."""

    @classmethod
    def from_plan(cls, plan: WindowPlan, numbers: np.ndarray, lengths: np.ndarray) -> "Spans":
        """Return the spans of a planned window.

        Args:
            plan: The window's plan.
            numbers: Number of each row over all sources, shape (R,), int64.
            lengths: Tokens of each row, shape (R,), int64.
        """
        cut, pieces = plan.cut, plan.pieces
        of_pieces = cut.lengths.astype(np.int32).take(pieces)
        if cut.cut_from is None:
            return cls(numbers.take(pieces), None, of_pieces)
        source = cut.cut_from[pieces]
        starts = cut.offsets[pieces] - offsets_of(lengths)[source]
        return cls(numbers[source], starts, of_pieces)


def digests(spans: Spans, plan: WindowPlan, rounds: Rounds, epoch: int, window: int) -> np.ndarray:
    """Return the digest of each round, over the micro-batches of all ranks, shape (rounds,),
    uint64.

    Args:
        spans: The spans of the window.
        plan: The window's plan.
        rounds: The rounds of any rank.
        epoch: Number of the epoch.
        window: Number of the window in the epoch.
    """
    first = int(rounds.starts[0])
    offsets = plan.batch_piece_offsets[first:]
    hashes = np.empty(len(spans.numbers), np.uint64)
    for block in blocks(len(hashes)):
        hashes[block] = _hashes(spans, block)
    of_batch = np.add.reduceat(hashes, offsets[:-1])
    place = np.arange(first, first + len(of_batch)).astype(np.uint64)
    place += np.uint64(derive_key(epoch, window))
    terms = mix64(of_batch ^ mix64(place))
    return np.add.reduceat(terms, rounds.starts - first)


def _hashes(spans: Spans, block: slice) -> np.ndarray:
    """Return a hash of each span of a block."""
    hashes = spans.numbers[block].view(np.uint64) * _ROW
    if spans.starts is not None:
        hashes += spans.starts[block].view(np.uint64) * _START
    hashes += spans.lengths[block].astype(np.uint64) * _LENGTH
    hashes ^= hashes >> np.uint64(29)
    hashes *= _START
    hashes ^= hashes >> np.uint64(32)
    return hashes


def tokens_by_source(
    spans: Spans, plan: WindowPlan, rounds: Rounds, row_ends: np.ndarray
) -> np.ndarray:
    """Return the tokens of each source in each round, over the micro-batches of all ranks.

    Args:
        spans: The spans of the window.
        plan: The window's plan.
        rounds: The rounds of any rank.
        row_ends: Running total of the rows of the sources, shape (sources,).

    Returns:
        Shape (rounds, sources), int64.
    """
    first = plan.batch_piece_offsets[
        rounds.starts
    ]  # first piece of each round; the last round has the rest
    tokens = np.empty((len(rounds.starts), len(row_ends)), np.int64)
    source = np.searchsorted(row_ends, spans.numbers, side="right") if len(row_ends) > 1 else 0
    for number in range(len(row_ends)):
        own = np.where(source == number, spans.lengths, 0) if len(row_ends) > 1 else spans.lengths
        tokens[:, number] = np.add.reduceat(own, first, dtype=np.int64)
    return tokens
