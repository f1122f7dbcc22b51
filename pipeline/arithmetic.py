"""Whole numbers that every room counts with: offsets of runs, ranges, division. Pure numpy."""

from typing import TypeVar

import numpy as np

__all__ = ["ceil_div", "offsets_of", "ranges", "round_up"]

Number = TypeVar("Number", int, np.ndarray)


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """Running total of sizes, with a leading 0, shape (len(sizes) + 1,), int64.

    Of runs that follow each other, run k is offsets[k] up to offsets[k + 1].
    """
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """All integers of several ranges, one range after the other."""
    integers = np.arange(sizes.sum())
    integers += np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    return integers


def ceil_div(value: Number, by: int) -> Number:
    """The quotient rounded up, or each of them: how many parts of `by` hold `value`."""
    return -(-value // by)


def round_up(value: Number, multiple_of: int) -> Number:
    """The smallest multiple of `multiple_of` that is at least `value`, or each of them."""
    return ceil_div(value, multiple_of) * multiple_of
