"""The digest: what was delivered, as one number that any two runs can compare.

The digest is a sum over micro-batches of a scrambled hash of (epoch, window, place, rows, spans).
Sums do not care who adds them, so it is the same on every rank, whatever the number of ranks and
workers; and each term holds its place, so another order is another digest. Torch-free.
"""

from dataclasses import dataclass

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.planning.batching import WindowPlan
from tokenfeed.pipeline.planning.order import blocks, derive_key, mix64
from tokenfeed.pipeline.planning.rounds import Rounds

__all__ = ["Spans", "digests", "tokens_by_source"]

_ROW, _START, _LENGTH = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xC2B2AE3D27D4EB4F),
    np.uint64(0x165667B19E3779F9),
)


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
    def from_plan(cls, plan: WindowPlan, numbers: np.ndarray, lengths: np.ndarray) -> "Spans":
        """The spans of a planned window.

        Args:
            plan: The window's plan.
            numbers: Number of each row within all sources, shape (R,), int64.
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
    """What each round adds to the digest, over the micro-batches of all ranks, (rounds,), uint64.

    Args:
        spans: What every piece of the window is.
        plan: The window's plan.
        rounds: The rounds, of any rank.
        epoch: Which epoch.
        window: Which window of it.
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
    """A scrambled hash of each of some spans."""
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
    """Tokens of each source in each round, over the micro-batches of all ranks.

    Args:
        spans: What every piece of the window is.
        plan: The window's plan.
        rounds: The rounds, of any rank.
        row_ends: Where each source's rows end among all, shape (sources,).

    Returns:
        Shape (rounds, sources), int64.
    """
    first = plan.batch_piece_offsets[rounds.starts]  # piece of each round; the last has the rest
    tokens = np.empty((len(rounds.starts), len(row_ends)), np.int64)
    source = np.searchsorted(row_ends, spans.numbers, side="right") if len(row_ends) > 1 else 0
    for number in range(len(row_ends)):
        own = np.where(source == number, spans.lengths, 0) if len(row_ends) > 1 else spans.lengths
        tokens[:, number] = np.add.reduceat(own, first, dtype=np.int64)
    return tokens
