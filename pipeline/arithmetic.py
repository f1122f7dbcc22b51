"""Arithmetic on flat numpy arrays: offsets, ranges, division, and rows of different lengths.

To copy rows, each row is one Arrow binary value over the flat array, and one memcpy. Arrow selects
and joins rows in C++, at 1,000 to 5,000 million tokens per second and core. An index per token
reached 250 to 500 million.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
    if not sizes.all():
        filled = sizes > 0
        starts, sizes = starts[filled], sizes[filled]
    integers = np.ones(sizes.sum(), np.int64)
    if len(sizes):  # the differences between neighbours, then their sums: 5 1 3 1 1 in the example
        integers[0] = starts[0]
        integers[np.cumsum(sizes[:-1])] = np.diff(starts) - sizes[:-1] + 1
    return np.cumsum(integers, out=integers)


def ceil_div(value: Number, by: int) -> Number:
    """Return value / by, rounded up."""
    return -(-value // by)


def round_up(value: Number, multiple_of: int) -> Number:
    """Return `value` rounded up to a multiple of `multiple_of`."""
    return ceil_div(value, multiple_of) * multiple_of


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of different lengths, with values of one dtype."""

    values: np.ndarray
    """All values, row by row, shape (N,)."""
    lengths: np.ndarray
    """Number of values of each row, shape (R,), int64; may be 0."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> np.ndarray:
        """Where each row begins in `values`, and the end, shape (R + 1,), int64."""
        return offsets_of(self.lengths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        same_lengths = np.array_equal(self.lengths, other.lengths)
        return same_lengths and np.array_equal(self.values, other.values)

    def rows(self) -> list[np.ndarray]:
        """Return one array per row. For few rows."""
        return np.split(self.values, self.offsets[1:-1]) if len(self) else []

    def take(self, rows: np.ndarray) -> "Ragged":
        """Return the rows with the given numbers, shape (K,), in that order."""
        return Ragged(take(self.values, self.offsets, rows), self.lengths[rows])


def take(values: np.ndarray, offsets: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """Concatenate the given pieces of `values`; piece k is values[offsets[k]:offsets[k + 1]]."""
    taken = _binary(values, offsets, narrow=True).take(_int64_array(pieces))
    return np.frombuffer(taken.buffers()[2] or b"", values.dtype)


def join(segments: Sequence[Ragged | np.ndarray]) -> Ragged:
    """Concatenate segments row by row. A plain array, shape (S,), is repeated in every row.

    All segments have the same dtype, and at least one is ragged.
    """
    num_rows = next(len(segment) for segment in segments if isinstance(segment, Ragged))
    segments = [segment for segment in segments if isinstance(segment, Ragged) or len(segment)]
    if len(segments) == 1 and isinstance(segments[0], Ragged):
        return segments[0]
    dtype = next(segment.values.dtype for segment in segments if isinstance(segment, Ragged))
    lengths = np.zeros(num_rows, np.int64)
    binaries = []
    for segment in segments:
        if isinstance(segment, Ragged):
            lengths += segment.lengths
            binaries.append(_binary(segment.values, segment.offsets))
        else:
            lengths += len(segment)
            binaries.append(_constant(segment.astype(dtype)))
    joined = pc.binary_join_element_wise(*binaries, _constant(np.empty(0, dtype)))  # pyright: ignore[reportAttributeAccessIssue]
    return Ragged(np.frombuffer(joined.buffers()[2] or b"", dtype), lengths)


def binaries(values: Sequence[bytes]) -> pa.LargeBinaryArray:
    """Copy byte strings into an Arrow array.

    It is built from buffers, because `pa.array` imports pandas.
    """
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    joined = np.frombuffer(b"".join(values), np.uint8)
    return _binary(joined, Ragged(joined, lengths).offsets)


def _binary(values: np.ndarray, offsets: np.ndarray, *, narrow: bool = False) -> pa.Array:
    """Return rows as binary values. `narrow` allows 32-bit offsets, which are a quarter faster."""
    narrow = narrow and values.nbytes < 1 << 31
    kind = pa.binary() if narrow else pa.large_binary()
    byte_offsets = (offsets * values.itemsize).astype(np.int32 if narrow else np.int64)
    buffers = [None, pa.py_buffer(byte_offsets), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)


def _constant(values: np.ndarray) -> pa.LargeBinaryScalar:
    """Return a scalar taken from an array, because `pa.scalar` imports pandas."""
    return _binary(values, np.array([0, len(values)]))[0]


def _int64_array(values: np.ndarray) -> pa.Array:
    """Return an array built from its buffer, because `pa.array` imports pandas."""
    buffer = pa.py_buffer(np.ascontiguousarray(values, np.int64))
    return pa.Array.from_buffers(pa.int64(), len(values), [None, buffer])
