"""Random keys, and keyed permutations that are computed at the required places only.

Permutations are keyed Feistel networks (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002). So a place costs the same in a range of a thousand and of a trillion. All random numbers come
from the integer arithmetic below, not from a library generator that may change with its version,
because the order is part of a saved state. Torch-free, no I/O.
"""

from collections.abc import Callable, Iterator
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
    """
    return _walk(_feistel, positions, size, key)


def unpermute(values: np.ndarray, size: int | np.ndarray, key: int | np.ndarray) -> np.ndarray:
    """Invert `permute`, at the same cost."""
    return _walk(_unfeistel, values, size, key)


def _walk(
    network: Callable[..., np.ndarray],
    values: np.ndarray,
    size: int | np.ndarray,
    key: int | np.ndarray,
) -> np.ndarray:
    """Apply a network repeatedly, until every value is below its `size`.

    The network permutes range(4 ** half_bits), which includes range(size). A value that leaves
    range(size) is permuted again until it returns ("cycle walking"), so the result is a permutation
    of range(size). Example with size 5, half_bits 2, so range(16): if the
    network sends 3 to 11 and 11 to 4, the result for 3 is 4.
    """
    sizes = np.atleast_1d(np.asarray(size, np.uint64))
    bits = np.frexp(np.maximum(sizes, 2) - 1)[1]  # `int.bit_length` of the largest value
    half_bits = ((bits + 1) // 2).astype(np.uint64)
    begun = next_keys(0, key)
    parts = [half_bits, *(next_keys(begun, number) for number in range(_ROUNDS))]
    reached = network(values.astype(np.uint64), *parts)
    while (outside := reached >= sizes).any():
        again = (part if part.size == 1 else part[outside] for part in parts)
        reached[outside] = network(reached[outside], *again)
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


def _unfeistel(values: np.ndarray, half_bits: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """Undo `_feistel`."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in reversed(keys):
        left, right = right ^ (mix64(left ^ key) & mask), left
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


_NEIGHBOURS = 16
"""Values of a block whose order `evenly` shuffles."""
_TRIED = 8
"""Numbers on each side of 0.618 * size among which `_stride` chooses."""


def evenly(places: np.ndarray, size: int | np.ndarray, key: int | np.ndarray) -> np.ndarray:
    """Return the values at some places of an endless order of range(size), shape (K,), int64.

    Any places in a row have values from all parts of the range, however many they are. Reading r
    has the places from r * size on, and every value once: strides of about 0.618 * size from a
    random value on. Then the values of every block of 16 neighbours change their places, so that
    the same values do not meet in every reading. `size` and `key` may be arrays with one value per
    place. Example with size 8, a stride of 5 and blocks of 2, from the value 3:

        strides             3 0 5 2 7 4 1 6
        blocks shuffled     2 1 5 3 6 4 0 7
    """
    reading, place = np.divmod(places, size)
    keys = next_keys(key, reading)
    begins = (derive_keys(keys, 0) % np.asarray(size, np.uint64)).astype(np.int64)
    strides = np.array(list(map(_stride, np.atleast_1d(size).tolist())))
    return _in_blocks(permute, (begins + place * strides) % size, size, keys)


def evenly_inverse(values: np.ndarray, size: int, key: int, reading: int) -> np.ndarray:
    """Return the places of values in one reading: the inverse of `evenly`."""
    keys = next_keys(key, reading)
    begins = (derive_keys(keys, 0) % np.uint64(size)).astype(np.int64)
    strides = _in_blocks(unpermute, values, size, keys) - begins
    places: np.ndarray = reading * size + strides * pow(_stride(size), -1, size) % size
    return places


def _in_blocks(
    network: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    values: np.ndarray,
    size: int | np.ndarray,
    keys: np.ndarray,
) -> np.ndarray:
    """Permute the values of each block of neighbours, with one key per value. The last block may be
    shorter."""
    block, nth = np.divmod(values, _NEIGHBOURS)
    width = np.minimum(_NEIGHBOURS, size - block * _NEIGHBOURS)
    of_block = derive_keys(derive_keys(keys, 1), block)
    made: np.ndarray = block * _NEIGHBOURS + network(nth, width, of_block)
    return made


@lru_cache(maxsize=1 << 14)
def _stride(size: int) -> int:
    """Return a number near 0.618 * size without a common divisor, whose multiples modulo `size` lie
    evenly: the terms of the continued fraction of their ratio have a small sum."""
    near = size * (GOLDEN >> 32) >> 32
    tried = range(max(1, near - _TRIED), near + _TRIED + 1)
    return min((n for n in tried if gcd(n, size) == 1), key=lambda n: _sum_of_terms(n, size))


def _sum_of_terms(number: int, size: int) -> int:
    total = 0
    while number:
        total += size // number
        number, size = size % number, number
    return total
