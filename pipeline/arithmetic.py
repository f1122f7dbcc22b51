"""Integer arithmetic on numpy arrays: offsets, ranges, division. Used by all rooms."""

from typing import TypeVar

import numpy as np

__all__ = ["ceil_div", "offsets_of", "ranges", "round_up"]

Number = TypeVar("Number", int, np.ndarray)


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """Return the running total of sizes with a leading 0, shape (len(sizes) + 1,), int64.

    Item k of consecutive items is at offsets[k] to offsets[k + 1] - 1: sizes 3, 2 give 0, 3, 5.
    """
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return all integers of several ranges, in order: starts 5, 9 and sizes 2, 3 give 5 6 9 10
    11."""
    integers = np.arange(sizes.sum())
    integers += np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    return integers


def ceil_div(value: Number, by: int) -> Number:
    """Return value / by, rounded up."""
    return -(-value // by)


def round_up(value: Number, multiple_of: int) -> Number:
    """Return `value` rounded up to a multiple of `multiple_of`."""
    return ceil_div(value, multiple_of) * multiple_of
