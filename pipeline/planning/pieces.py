"""Pieces: whole rows, and the parts of rows that are too long. Pure functions on numpy arrays."""

from dataclasses import dataclass

import numpy as np

from tokenfeed.pipeline.arithmetic import ceil_div, offsets_of, ranges
from tokenfeed.pipeline.planning.order import mix64

__all__ = ["Pieces", "cut_rows", "random_order", "regroup"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a window, in the order of its rows."""

    offsets: np.ndarray
    """Where each piece begins in the tokens of the window, and the end, shape (P + 1,), int64."""
    lengths: np.ndarray
    """Tokens of each piece, shape (P,), int64."""
    cut_from: np.ndarray | None
    """Row of each piece, shape (P,), int64; None: no row was cut, and P = R."""

    @property
    def beginnings(self) -> np.ndarray:
        """First piece of each row, shape (R,), int64."""
        if self.cut_from is None:
            return np.arange(len(self.lengths))
        return np.flatnonzero(np.diff(self.cut_from, prepend=-1))

    @property
    def rows(self) -> np.ndarray:
        """Row of each piece, shape (P,), int64."""
        return np.arange(len(self.lengths)) if self.cut_from is None else self.cut_from


def cut_rows(lengths: np.ndarray, longest: int) -> Pieces:
    """Cut rows into pieces of at most `longest` tokens."""
    if lengths.max() <= longest:
        return Pieces(offsets_of(lengths), lengths, None)
    counts = ceil_div(lengths, longest)
    rows = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.cumsum(lengths) - lengths)[rows] + nth * longest
    offsets = np.append(starts, lengths.sum())
    return Pieces(offsets, np.diff(offsets), rows)


def regroup(
    items: np.ndarray, offsets: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Take groups of consecutive items in another order, keeping the order inside each.

    Returns:
        The items, and the offsets of the groups into them, shape (len(order) + 1,).
    """
    starts, sizes = offsets[:-1][order], np.diff(offsets)[order]
    new_offsets = offsets_of(sizes)
    if len(items) > 64 * len(offsets):  # few large groups: a copy per group is cheaper
        pairs = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        taken = [items[start:stop] for start, stop in pairs]
        return np.concatenate(taken) if taken else items[:0], new_offsets
    return items[ranges(starts, sizes)], new_offsets


def random_order(count: int, key: int) -> np.ndarray:
    """Return a permutation of range(count), int64, that depends on a 64-bit key."""
    keys = mix64(np.arange(count, dtype=np.uint64) ^ np.uint64(key))
    return np.argsort(keys)  # all keys differ, so every sort gives the same order
