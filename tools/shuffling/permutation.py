"""A keyed permutation of all rows of a split, for billions of them one after the other.

A Feistel network like `permute` of `planning.order`, on pairs instead of bits: of the pairs below
(a, b) there are hardly more than rows, so next to no row leaves the range and is sent again. And
its round functions are tables of random values, for a half takes no more values than the root of
the rows: 19 ns a row, where hashing in each round costs 180.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, isqrt

import numpy as np

from tokenfeed.pipeline.planning.order import derive_key, mix64

__all__ = ["Permutation"]

_ROUNDS = 6
_SLICE_ROWS = 1 << 14
"""Rows sent at once, within the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """A permutation of range(size); another key is another one."""

    size: int
    key: int

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """Where numbers go, shape (R,), int64."""
        places = np.empty(len(numbers), np.int64)
        for start in range(0, len(numbers), _SLICE_ROWS):
            part = slice(start, start + _SLICE_ROWS)
            places[part] = self._walk(numbers[part].astype(np.uint64))
        return places

    def _walk(self, values: np.ndarray) -> np.ndarray:
        """Send values, and those again that left the range, until none is outside."""
        values = self._send(values)
        while (outside := values >= self.size).any():
            values[outside] = self._send(values[outside])
        return values

    def _send(self, values: np.ndarray) -> np.ndarray:
        """Send values below a * b to each other."""
        a, b = self._extents
        high = values // b
        low = values - high * b
        for of_low, of_high in self._tables:
            high = _turned(high, of_low, low, a)
            low = _turned(low, of_high, high, b)
        sent: np.ndarray = high * b + low
        return sent

    @cached_property
    def _extents(self) -> tuple[np.uint64, np.uint64]:
        a = isqrt(self.size - 1) + 1
        return np.uint64(a), np.uint64(ceil(self.size / a))

    @cached_property
    def _tables(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For every two rounds, what each value of one half adds to the other."""
        a, b = self._extents
        return [
            (self._table(number, b, a), self._table(number + 1, a, b))
            for number in range(0, _ROUNDS, 2)
        ]

    def _table(self, number: int, size: np.uint64, extent: np.uint64) -> np.ndarray:
        """So many random values below `extent`."""
        counters = np.uint64(derive_key(self.key, number)) + np.arange(size, dtype=np.uint64)
        random = mix64(mix64(counters)) >> np.uint64(32)
        table: np.ndarray = random * extent >> np.uint64(32)
        return table


def _turned(
    half: np.ndarray, table: np.ndarray, other: np.ndarray, extent: np.uint64
) -> np.ndarray:
    """`half` plus the other half's values of a table, modulo `extent`."""
    half = half + table.take(other.view(np.int64))
    turned: np.ndarray = np.minimum(half, half - extent)  # what is below 0 wraps: the larger
    return turned
