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


_PARTS, _LEAST_TURNS = 128, 8
"""Record batches of a default window: a source has about as many parts, so that a window has one
record batch of each. Fewer, if a part would have fewer record batches than the second number."""
_PAIR = 2
"""Neighbouring parts that change their places in the order of a reading."""
_TRIED = 8
"""Numbers on each side of a ratio times the size among which `_stride` chooses."""
_RATIOS = tuple(
    int(2**32 / (first + 1 / (second + GOLDEN / 2**64)))
    for first, second in ((2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (2, 3), (3, 3))
)
"""Strides relative to the size, times 2**32. From some term on, all terms of their continued
fractions are 1, so any multiples in a row lie evenly. Of a ratio and 1 minus it, one is here:
multiples of both have the same neighbours."""


def parts_of(size: int | np.ndarray) -> np.ndarray:
    """Return the number of parts of a range from which `evenly` takes its values in turn."""
    turns = np.maximum(_LEAST_TURNS, (2 * np.asarray(size) + _PARTS) // (2 * _PARTS))
    parts: np.ndarray = np.maximum(1, size // turns)
    return parts


def evenly(places: np.ndarray, size: int | np.ndarray, key: int | np.ndarray) -> np.ndarray:
    """Return the values at some places of an endless order of range(size), shape (K,), int64.

    Reading r has the places from r * size on, and every value once. The range is divided into about
    128 equal parts of neighbours. In each turn, a reading takes one value of every part, so any 128
    places in a row have a value of every part, and fewer or more lie evenly: strides over the parts
    from a random one on, where some parts change places with their neighbours. The key of the
    reading chooses one of eight strides, and a permutation for each part. So values that were near
    in one reading are near in the next only by chance. `size` and `key` may be arrays with one
    value per place.

    Example with size 10 in 3 parts, where the last turn takes what the larger part has more:

        parts, each permuted    2 0 1 | 4 3 5 | 8 6 9 7
        turns                   4 2 8   3 0 6   5 1 9   7
    """
    reading, place = np.divmod(places, size)
    keys = next_keys(key, reading)
    parts = parts_of(size)
    turn, nth = np.divmod(place, parts)
    count = np.where(turn < size // parts, parts, size % parts)  # parts that the turn takes from
    part = ((_strided(nth, count, keys) + 1) * parts - 1) // count  # the larger ones lie evenly
    first = part * size // parts
    width = (part + 1) * size // parts - first
    made: np.ndarray = first + permute(turn, width, derive_keys(derive_keys(keys, 1), part))
    return made


def _strided(places: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the values at places of an order of range(size) by strides of about 0.22 to 0.44 of
    the size. `sizes` and `keys` have one value per place."""
    begins = (derive_keys(keys, 0) % sizes.astype(np.uint64)).astype(np.int64)
    ratios = (derive_keys(keys, 2) % np.uint64(len(_RATIOS))).astype(np.int64)
    pairs = zip(*(each.tolist() for each in np.broadcast_arrays(sizes, ratios)), strict=True)
    strides = np.array([_stride(*pair) for pair in pairs], np.int64)
    pair, nth = np.divmod((begins + places * strides) % sizes, _PAIR)
    width = np.minimum(_PAIR, sizes - pair * _PAIR)
    made: np.ndarray = pair * _PAIR + permute(nth, width, derive_keys(derive_keys(keys, 3), pair))
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
