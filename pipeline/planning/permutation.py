"""Random keys, and keyed permutations that are computed at the required places only.

Permutations are keyed Feistel networks (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002). So a place costs the same in a range of a thousand and of a trillion. All random numbers come
from the integer arithmetic below, not from a library generator that may change with its version,
because the order is part of a saved state. Torch-free, no I/O.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import gcd

import numpy as np

_ROUNDS = 6
GOLDEN = 0x9E3779B97F4A7C15
"""0.618 * 2**64."""
WORD = (1 << 64) - 1
BLOCK = 1 << 13
"""Words that fit into a core's cache during several passes."""


def blocks(count: int) -> Iterator[slice]:
    """Cut range(count) into blocks that fit into the cache: half the time for many passes."""
    return (slice(start, start + BLOCK) for start in range(0, count, BLOCK))


def mix64(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers, invertibly: the finalizer of SplitMix64 (Steele et al., 2014)."""
    values = values.astype(np.uint64)
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def derive_key(*parts: int) -> int:
    """Return a 64-bit key from integers (seed, epoch, window, ...). Their order matters."""
    key = 0
    for part in parts:
        key = _mix_one((key + GOLDEN + part) & WORD)
    return key


def _mix_one(value: int) -> int:
    """Return `mix64` of one integer, in pure Python: a tenth of the time."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & WORD
    return value ^ value >> 31


def permute(positions: np.ndarray, size: int | np.ndarray, key: int | np.ndarray) -> np.ndarray:
    """Apply a keyed permutation of range(size) to positions.

    Args:
        positions: Any shape, every value in [0, size).
        size: Length of the permuted range. Or one length per position, int64.
        key: 64 bits; every key gives another permutation. Or one key per position, uint64.

    Returns:
        The permuted positions: int64, the shape of `positions`.

    Cost: O(len(positions)) for any `size`: fewer than four passes of the network on average.

    The network permutes range(4 ** half_bits), which includes range(size). A value that leaves
    range(size) is permuted again until it returns ("cycle walking"), so the result is a permutation
    of range(size). Example with size 5, half_bits 2, so range(16): if the network sends 3 to 11 and
    11 to 4, the result for 3 is 4.
    """
    sizes = np.atleast_1d(np.asarray(size, np.uint64))
    bits = np.frexp(np.maximum(sizes, 2) - 1)[1]  # `int.bit_length` of the largest value
    half_bits = ((bits + 1) // 2).astype(np.uint64)
    begun = next_keys(0, key)
    parts = [half_bits, *(next_keys(begun, number) for number in range(_ROUNDS))]
    reached = _feistel(positions.astype(np.uint64), *parts)
    while (outside := reached >= sizes).any():
        again = (part if part.size == 1 else part[outside] for part in parts)
        reached[outside] = _feistel(reached[outside], *again)
    return reached.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """Permute values below 4 ** half_bits. `keys` has a key per round, or a key per round and
    value."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) & mask)
    made: np.ndarray = left << half_bits | right
    return made


def derive_keys(keys: np.ndarray | int, part: np.ndarray | int) -> np.ndarray:
    """Return `derive_key(key, part)` for many keys or parts."""
    return next_keys(next_keys(0, keys), part)


def next_keys(keys: np.ndarray | int, part: np.ndarray | int) -> np.ndarray:
    """Return `derive_key(*parts, part)`, where `keys` are the keys of `parts`; for many of them."""
    sums = np.atleast_1d(np.asarray(keys, np.uint64)) + np.asarray(part, np.uint64)
    made: np.ndarray = mix64(sums + np.uint64(GOLDEN))
    return made


_NEIGHBOURS, _WINDOW = 16, 128
"""Values of a block whose order `evenly` shuffles, at least; and record batches of a default
window. Of a larger range, a block has the 128th part: about one value for each default window."""
_TRIED = 8
"""Numbers on each side of a ratio times the size among which `_stride` chooses."""
_RATIOS = tuple(
    int(2**32 / (first + 1 / (second + GOLDEN / 2**64)))
    for first, second in ((2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (2, 3), (3, 3))
)
"""Strides relative to the size, times 2**32. From some term on, all terms of their continued
fractions are 1, so any multiples in a row lie evenly. Of a ratio and 1 minus it, one is here:
multiples of both have the same neighbours."""


def neighbours(size: int | np.ndarray) -> np.ndarray:
    """Return the length of the blocks whose order `evenly` shuffles."""
    found: np.ndarray = np.maximum(_NEIGHBOURS, np.asarray(size) // _WINDOW)
    return found


def evenly(places: np.ndarray, size: int | np.ndarray, key: int | np.ndarray) -> np.ndarray:
    """Return the values at some places of an endless order of range(size), shape (K,), int64.

    Any places in a row have values from all parts of the range, however many they are. Reading r
    has the places from r * size on, and every value once: strides of about 0.22 to 0.44 of the size
    from a random value on. The key of the reading chooses one of eight strides. Then the values of
    every block of 16 neighbours or more change their places. So values that were near in one
    reading are near in the next only by chance. `size` and `key` may be arrays with one value per
    place.

    Example with size 8, a stride of 3 and blocks of 2, from the value 3:

        strides             3 6 1 4 7 2 5 0
        blocks shuffled     2 7 1 5 6 3 4 0
    """
    reading, place = np.divmod(places, size)
    keys = next_keys(key, reading)
    sizes = np.asarray(size, np.uint64)
    begins = (derive_keys(keys, 0) % sizes).astype(np.int64)
    ratios = (derive_keys(keys, 2) % np.uint64(len(_RATIOS))).astype(np.int64)
    pairs = zip(*(each.tolist() for each in np.broadcast_arrays(size, ratios)), strict=True)
    strides = np.array([_stride(*pair) for pair in pairs], np.int64)
    values = (begins + place * strides) % size
    length = neighbours(size)
    block, nth = np.divmod(values, length)
    width = np.minimum(length, size - block * length)  # the last block may be shorter
    of_block = derive_keys(derive_keys(keys, 1), block)
    made: np.ndarray = block * length + permute(nth, width, of_block)
    return made


@lru_cache(maxsize=1 << 14)
def _stride(size: int, ratio: int) -> int:
    """Return a number near a ratio of the size without a common divisor, whose multiples modulo
    `size` lie evenly: the terms of the continued fraction of their ratio have a small sum."""
    near = size * _RATIOS[ratio] >> 32
    tried = range(max(1, near - _TRIED), near + _TRIED + 1)
    return min((n for n in tried if gcd(n, size) == 1), key=lambda n: _sum_of_terms(n, size))


def _sum_of_terms(number: int, size: int) -> int:
    total = 0
    while number:
        total += size // number
        number, size = size % number, number
    return total
