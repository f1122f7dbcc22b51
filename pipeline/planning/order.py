"""The order of an epoch: the record batches of each window, as a pure function.

A window is a stratified sample of the source. With V windows, the record batches are cut into
strata of V neighbours, and every window takes one batch of each stratum, in an order of the
stratum's own. So even if a corpus is sorted by source, date or length, every window represents the
whole corpus. One epoch of 12 record batches in 3 windows:

    strata           0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
    first window         2   3         7     9
    second window    0           5   6          10
    third window       1       4         8         11

Permutations are keyed Feistel networks, evaluated only at the required places (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). So a start, a resume or a new epoch costs the same
for a thousand rows as for a trillion. All random numbers come from the integer arithmetic below,
not from a library generator that may change with its version, because the order is part of a saved
state. Torch-free, no I/O.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import gcd
from typing import NamedTuple, Self

import numpy as np

_ROUNDS = 6
CYCLE = 8
"""Epochs after which the strata of bands get new random starts; see `length_bands`."""
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


@dataclass(frozen=True, slots=True)
class Draw:
    """The random keys of one window."""

    key: int
    """64 bits that differ in every epoch."""
    cycle_key: int
    """64 bits that stay the same for a cycle of epochs, so that an epoch can differ from the one
    before on purpose."""
    cycle_epoch: int
    """Number of the epoch in its cycle."""
    num_windows: int
    """Windows of the epoch."""
    is_even: bool = False
    """Whether short and long steps follow each other evenly, or in random order."""

    def of_part(self, nth: int) -> Self:
        """Return the random keys of one part of the window."""
        keys = derive_key(self.key, nth), derive_key(self.cycle_key, nth)
        return replace(self, key=keys[0], cycle_key=keys[1])


class Stretch(NamedTuple):
    """Consecutive windows with the same proportion of the sources."""

    first_window: int
    num_windows: int
    batches: tuple[float, ...]
    """Record batches of each source in an average window."""


@dataclass(frozen=True, slots=True)
class MixturePhase:
    """A part of an epoch in which the sources keep one proportion."""

    begins: tuple[int, ...]
    """Record batches of each source in the phases before."""
    batches: tuple[int, ...]
    """Record batches of each source in the phase; a repeated source has more than its size."""
    num_windows: int
    """At most the largest of `batches`, so that no window is empty."""


@dataclass(frozen=True)
class SourceOrder(ABC):
    """The record batches of one or several sources in the windows of every epoch.

    The record batches of a source have places, in the order of reading. A reading is one pass over
    the source. Reading r has the places from r * size on, and a permutation of its own.
    """

    sizes: tuple[int, ...]
    """Record batches of each source."""
    seed: int
    shuffle: bool
    """False: every reading has the record batches in file order."""
    keeps_rows: bool = field(default=False, kw_only=True)
    """Whether a window has its record batches in the order of reading, for `order`="file"."""

    @abstractmethod
    def places(self, source: int, window: int) -> tuple[int, int]:
        """Return the first place of a source in a window, and the place after the last."""

    @abstractmethod
    def _shuffled(self, sources: np.ndarray, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the record batches of some sources at some places, all of shape (K,), int64."""

    @abstractmethod
    def _places_of(self, source: int, epoch: int, reading: int, batches: np.ndarray) -> np.ndarray:
        """Return the places of record batches of a source in one reading: the inverse of
        `_shuffled`."""

    def window(self, epoch: int, window: int) -> np.ndarray:
        """Return the record batches of a window, counted over all sources, shape (K,), int64.

        They ascend in each source, so that a shard is opened once; with `keeps_rows`, they have the
        order of reading.
        """
        count = len(self.sizes)
        starts, stops = np.array([self.places(each, window) for each in range(count)]).T
        sources = np.repeat(np.arange(count), stops - starts)
        offsets = starts + (stops - starts) - np.cumsum(stops - starts)
        places = np.arange(len(sources)) + offsets[sources]
        sizes = np.array(self.sizes)
        if self.shuffle:
            batches = self._shuffled(sources, epoch, places)
        else:
            batches = places % sizes[sources]
        batches = batches + (np.cumsum(sizes) - sizes)[sources]
        return batches if self.keeps_rows else np.sort(batches)

    def places_of(self, source: int, epoch: int, reading: int, batches: np.ndarray) -> np.ndarray:
        """Return the places of record batches of a source in one reading."""
        if not self.shuffle:
            return reading * self.sizes[source] + batches
        return self._places_of(source, epoch, reading, batches)


@dataclass(frozen=True)
class EpochOrder(SourceOrder):
    """The order of a data set or a mixture. All epochs have the same phases."""

    phases: tuple[MixturePhase, ...]
    """The phases of an epoch, in order; a single source has one phase."""

    @property
    def num_windows(self) -> int:
        """Number of windows of an epoch."""
        return sum(phase.num_windows for phase in self.phases)

    @property
    def batches_read(self) -> tuple[int, ...]:
        """Record batches of each source in an epoch; a repeated source has more than its size."""
        return tuple(map(sum, zip(*(phase.batches for phase in self.phases), strict=True)))

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """The whole epoch, with its average window."""
        per_window = tuple(batches / self.num_windows for batches in self.batches_read)
        return (Stretch(0, self.num_windows, per_window),)

    def draw(self, epoch: int, window: int) -> Draw | None:
        """Return the random keys of a window; None without shuffling."""
        if not self.shuffle:
            return None
        cycle, cycle_epoch = divmod(epoch, CYCLE)
        cycle_key = derive_key(self.seed, cycle, window, CYCLE)
        key = derive_key(self.seed, epoch, window)
        return Draw(key, cycle_key, cycle_epoch, self.num_windows)

    def _shuffled(self, sources: np.ndarray, epoch: int, places: np.ndarray) -> np.ndarray:
        sizes, rounds = np.array(self.sizes)[sources], np.array(self._rounds)[sources]
        return batches_at(places, sizes, rounds, next_keys(derive_key(self.seed, epoch), sources))

    def _places_of(self, source: int, epoch: int, reading: int, batches: np.ndarray) -> np.ndarray:
        size, rounds = self.sizes[source], self._rounds[source]
        return places_at(batches, size, rounds, derive_key(self.seed, epoch, source), reading)

    def places(self, source: int, window: int) -> tuple[int, int]:
        """Return the first place of a source in a window, and the place after the last.

        The number of places in the windows of a phase differs by at most one.
        """
        for phase in self.phases:
            if window < phase.num_windows:
                break
            window -= phase.num_windows
        begins, batches = phase.begins[source], phase.batches[source]
        first, stop = (batches * edge // phase.num_windows for edge in (window, window + 1))
        return begins + first, begins + stop

    def windows_of(self, source: int, places: np.ndarray) -> np.ndarray:
        """Return the window of each place in a source's epoch; -1 for a place without a window."""
        windows = np.full(len(places), -1)
        first = 0
        for phase in self.phases:
            begin, count = phase.begins[source], phase.batches[source]
            inside = (places >= begin) & (places < begin + count)
            nth = (places[inside] - begin + 1) * phase.num_windows - 1
            windows[inside] = first + nth // max(1, count)
            first += phase.num_windows
        return windows

    @cached_property
    def _rounds(self) -> tuple[int, ...]:
        """Number of windows that read each source once, at the rate of its first phase."""
        rounds = [0] * len(self.sizes)
        for phase in self.phases:
            for source, batches in enumerate(phase.batches):
                if batches and not rounds[source]:
                    per_reading = round(self.sizes[source] * phase.num_windows / batches)
                    rounds[source] = min(self.sizes[source], max(1, per_reading))
        return tuple(rounds)


def batches_at(
    places: np.ndarray, size: int | np.ndarray, num_rounds: int | np.ndarray, key: int | np.ndarray
) -> np.ndarray:
    """Return the record batches at some places of a source's order, shape (K,), int64.

    Reading r of the source has the places from r * size on, and a permutation of its own. For
    places of several sources, the other arguments are arrays with one value per place.
    """
    reading, place = np.divmod(places, size)
    keys = next_keys(key, reading)
    batches = _stratified(place, size, num_rounds, keys)
    made: np.ndarray = (batches + _offsets(keys, size)) % size
    return made


def places_at(
    batches: np.ndarray, size: int, num_rounds: int, key: int, reading: int
) -> np.ndarray:
    """Return the places of record batches in one reading: the inverse of `batches_at`."""
    keys = next_keys(key, reading)
    values = (batches - _offsets(keys, size)) % size
    return reading * size + _unstratified(values, size, num_rounds, keys)


def _offsets(keys: np.ndarray, size: int | np.ndarray) -> np.ndarray:
    """Return where the strata of each reading begin: every reading has other strata."""
    return (derive_keys(keys, 3) % np.asarray(size, np.uint64)).astype(np.int64)


def _stratified(
    places: np.ndarray, size: int | np.ndarray, num_rounds: int | np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """Permute range(size) so that every round, a run of places, has one value of each stratum.

    Round r has the places from size * r // num_rounds on. A stratum is `num_rounds` consecutive
    values. The last stratum may be shorter, and then only some rounds have a value of it. A window
    may end inside a round, or be longer, so every round has its strata in a random order.

    Example with size 7 and 3 rounds: strata 0 1 2 | 3 4 5 | 6, and rounds of places 0 1 | 2 3 |
    4 5 6. With one key, places 0 to 6 have the values 3 2 | 4 1 | 6 5 0. Only the last round has a
    value of the short stratum.

    Args:
        places: Places, shape (K,), int64.
        size: Length of the permuted range, or one for each place.
        num_rounds: Number of rounds, at most `size`, or one for each place.
        keys: 64-bit key of each place, shape (K,), uint64. Every key gives another permutation.

    Returns:
        The value at each place, shape (K,), int64.
    """
    rounds = (num_rounds * (places + 1) - 1) // size
    begins, stops = size * rounds // num_rounds, size * (rounds + 1) // num_rounds
    strata = permute(places - begins, stops - begins, derive_keys(derive_keys(keys, 0), rounds))
    # rounds before it with a value of the same stratum: of the last stratum, only some have one
    nth = np.where(strata < size // num_rounds, rounds, begins - rounds * (size // num_rounds))
    made: np.ndarray = strata * num_rounds + permute(nth, *_strata(strata, size, num_rounds, keys))
    return made


def _unstratified(values: np.ndarray, size: int, num_rounds: int, keys: np.ndarray) -> np.ndarray:
    """Invert `_stratified`: return the places of values. `keys` has the one key of them
    all."""
    strata, values = np.divmod(values, num_rounds)
    lengths, of_strata = _strata(strata, size, num_rounds, keys)
    nth = unpermute(values, lengths, of_strata)
    rounds = ((nth + 1) * num_rounds - 1) // lengths
    begins, stops = size * rounds // num_rounds, size * (rounds + 1) // num_rounds
    of_rounds = derive_keys(derive_keys(keys, 0), rounds)
    made: np.ndarray = begins + unpermute(strata, stops - begins, of_rounds)
    return made


def _strata(
    strata: np.ndarray, size: int | np.ndarray, num_rounds: int | np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the length of each stratum, and the key of its permutation; see `_stratified`."""
    is_full = strata < size // num_rounds
    lengths = np.where(is_full, num_rounds, size % num_rounds)
    of_full = derive_keys(derive_keys(keys, 1), strata)
    return lengths, np.where(is_full, of_full, derive_keys(keys, 2))


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
