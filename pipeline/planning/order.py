"""Order without memory: which record batches make up which window, as a pure function.

A seed and an epoch give a permutation of all record batches; consecutive runs of it are the
windows. The permutation is a keyed Feistel network evaluated only where it is asked (Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002), so a start, a resume or a new epoch costs
the same for a thousand rows as for a trillion. All randomness is integer arithmetic of our own, not
a library generator whose stream may change with its version: order is part of a saved state.
Torch-free and free of I/O.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

__all__ = ["EpochOrder", "Stretch", "mix64", "permute", "stream_key"]

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def mix64(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers, one to one: the finalizer of SplitMix64 (Steele et al., 2014)."""
    values = values.astype(np.uint64)
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def stream_key(*parts: int) -> int:
    """One 64-bit key out of several integers (seed, epoch, window, ...); their order matters."""
    key = 0
    for part in parts:
        key = _mix_one((key + _GOLDEN + part) & _WORD)
    return key


def _mix_one(value: int) -> int:
    """What `mix64` makes of a single integer: in Python alone, a tenth of the time."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD
    return value ^ value >> 31


def permute(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where a keyed permutation of range(size) sends each position.

    Args:
        positions: Any shape, every value in [0, size).
        size: Length of the permuted range.
        key: 64 bits; another key is another permutation.

    Returns:
        int64, the shape of `positions`.

    Cost: O(len(positions)), whatever `size` is: the walk leaves the range less than 3 times of 4.
    """
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    values = _feistel(positions.astype(np.uint64), half_bits, key)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half_bits, key)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, key: int) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for number in range(_ROUNDS):
        round_key = np.uint64(stream_key(key, number))
        left, right = right, left ^ (mix64(right ^ round_key) & mask)
    return left << shift | right


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of an epoch in which the sources keep one proportion."""

    begins: tuple[int, ...]
    """Record batches of each source that came before it in the epoch."""
    batches: tuple[int, ...]
    """Record batches of each source in it; more than the source has where it is repeated."""
    num_windows: int
    """At most the largest of `batches`, so that no window is empty."""


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The windows of every epoch over the record batches of one or several sources."""

    sizes: tuple[int, ...]
    """Record batches of each source."""
    stretches: tuple[Stretch, ...]
    """An epoch, one after the other; a single source has one."""
    seed: int
    shuffle: bool
    """False: record batches in the order of the files, every epoch the same."""

    @classmethod
    def of_one(cls, num_batches: int, num_windows: int, *, seed: int, shuffle: bool) -> Self:
        """The order of a single source."""
        return cls((num_batches,), (Stretch((0,), (num_batches,), num_windows),), seed, shuffle)

    @property
    def num_windows(self) -> int:
        """Windows of an epoch."""
        return sum(stretch.num_windows for stretch in self.stretches)

    @property
    def batches_read(self) -> tuple[int, ...]:
        """Record batches of each source in an epoch; more than it has where it is repeated."""
        return tuple(map(sum, zip(*(stretch.batches for stretch in self.stretches), strict=True)))

    def window(self, epoch: int, window: int) -> np.ndarray:
        """Record batches of one window, counted over all sources one after the other, (K,), int64.

        Windows are as even as can be: in a stretch K differs by at most one for each source.
        """
        for stretch in self.stretches:
            if window < stretch.num_windows:
                break
            window -= stretch.num_windows
        parts, first = [], 0
        for source, size in enumerate(self.sizes):
            start, stop = (
                stretch.begins[source] + stretch.batches[source] * edge // stretch.num_windows
                for edge in (window, window + 1)
            )
            parts.append(first + self._batches(source, epoch, start, stop))
            first += size
        return np.concatenate(parts)

    def window_key(self, epoch: int, window: int) -> int:
        """The key of all randomness inside one window."""
        return stream_key(self.seed, epoch, window) if self.shuffle else 0

    def _batches(self, source: int, epoch: int, start: int, stop: int) -> np.ndarray:
        """Places `start` up to `stop` of a source's epoch; beyond its size it begins again."""
        size = self.sizes[source]
        turn, place = np.divmod(np.arange(start, stop), size)
        if not self.shuffle:
            return place
        for number in np.unique(turn).tolist():
            turned = turn == number
            key = stream_key(self.seed, epoch, source, number)
            place[turned] = permute(place[turned], size, key)
        return place
