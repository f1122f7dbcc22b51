"""The ledger: what was delivered, as one number that any two runs can compare.

The digest is a sum over micro-batches of a scrambled hash of (epoch, window, place, rows, spans).
Sums do not care who adds them, so it is the same on every rank, whatever the number of ranks and
workers; and each term holds its place, so another order is another digest. Torch-free.
"""

import numpy as np

from tokenfeed.pipeline.batching import WindowPlan, offsets_of
from tokenfeed.pipeline.order import mix64, stream_key
from tokenfeed.pipeline.rounds import Rounds

__all__ = ["digests", "tokens_by_source"]

_ROW, _START, _LENGTH = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xC2B2AE3D27D4EB4F),
    np.uint64(0x165667B19E3779F9),
)


def digests(
    plan: WindowPlan, numbers: np.ndarray, rounds: Rounds, epoch: int, window: int
) -> np.ndarray:
    """What each round adds to the digest, over the micro-batches of all ranks, (rounds,), uint64.

    Args:
        plan: The window's plan.
        numbers: Number of each of its rows within all sources, shape (R,).
        rounds: The rounds, of any rank.
        epoch: Which epoch.
        window: Which window of it.
    """
    if not len(rounds.starts):
        return np.zeros(0, np.uint64)
    pieces = plan.pieces[plan.batch_piece_offsets[rounds.starts[0]] :]
    offsets = plan.batch_piece_offsets[rounds.starts[0] :] - (len(plan.pieces) - len(pieces))
    lengths = np.diff(plan.piece_offsets)[pieces].view(np.uint64)
    hashes = numbers[plan.piece_rows[pieces] if plan.is_cut else pieces].view(np.uint64) * _ROW
    if plan.is_cut:
        hashes += plan.piece_offsets[:-1][pieces].view(np.uint64) * _START
    hashes += lengths * _LENGTH
    hashes ^= hashes >> np.uint64(29)
    hashes *= _START
    hashes ^= hashes >> np.uint64(32)
    of_batch = np.add.reduceat(hashes, offsets[:-1])
    place = np.arange(rounds.starts[0], rounds.ends[-1]).astype(np.uint64)
    place += np.uint64(stream_key(epoch, window))
    terms = mix64(of_batch ^ mix64(place))
    return np.add.reduceat(terms, rounds.starts - rounds.starts[0])


def tokens_by_source(
    plan: WindowPlan, numbers: np.ndarray, rounds: Rounds, row_ends: np.ndarray
) -> np.ndarray:
    """Tokens of each source in each round, over the micro-batches of all ranks.

    Args:
        plan: The window's plan.
        numbers: Number of each of its rows within all sources, shape (R,).
        rounds: The rounds, of any rank.
        row_ends: Where each source's rows end among all, shape (sources,).

    Returns:
        Shape (rounds, sources), int64.
    """
    tokens = np.zeros((len(rounds.starts), len(row_ends)), np.int64)
    if not len(rounds.starts):
        return tokens
    lengths = np.diff(plan.piece_offsets)[plan.pieces]
    edges = plan.batch_piece_offsets[np.append(rounds.starts, rounds.ends[-1])]
    if len(row_ends) == 1:
        tokens[:, 0] = np.diff(offsets_of(lengths)[edges])
        return tokens
    source = np.searchsorted(row_ends, numbers[plan.piece_rows[plan.pieces]], side="right")
    for number in range(len(row_ends)):
        mine = np.where(source == number, lengths, 0)
        tokens[:, number] = np.diff(offsets_of(mine)[edges])
    return tokens
