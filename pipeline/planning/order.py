"""Order without memory: which record batches make up which window, as a pure function.

A window is a sample of the whole source, stratified: in V windows, the record batches are cut into
strata of V neighbours, and every window takes one of each stratum, by the stratum's own
permutation. So a corpus that is sorted by source, date or length stands in every window as it
stands in the whole. 12 record batches in 3 windows, one epoch:

    strata           0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
    first window         2   3         7     9
    second window    0           5   6          10
    third window       1       4         8         11

Permutations are keyed Feistel networks evaluated only where they are asked (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002), so a start, a resume or a new epoch costs the same
for a thousand rows as for a trillion. All randomness is integer arithmetic of our own, not a
library generator whose stream may change with its version: order is part of a saved state.
Torch-free and free of I/O.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

__all__ = [
    "CYCLE",
    "Draw",
    "EpochOrder",
    "Phase",
    "blocks",
    "derive_key",
    "derive_keys",
    "mix64",
    "next_keys",
    "permute",
    "unpermute",
]

_ROUNDS = 6
CYCLE = 8
"""Epochs after which the strata of bands begin anew; see `bands`."""
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_BLOCK = 1 << 13
"""Words that stay in a core's cache while several passes are made over them."""


def blocks(count: int) -> Iterator[slice]:
    """Cut range(count) into blocks that stay in the cache: half the time, where passes are many."""
    return (slice(start, start + _BLOCK) for start in range(0, count, _BLOCK))


def mix64(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers, one to one: the finalizer of SplitMix64 (Steele et al., 2014)."""
    values = values.astype(np.uint64)
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def derive_key(*parts: int) -> int:
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


def permute(positions: np.ndarray, size: int, key: int | np.ndarray) -> np.ndarray:
    """Where a keyed permutation of range(size) sends each position.

    Args:
        positions: Any shape, every value in [0, size).
        size: Length of the permuted range.
        key: 64 bits; another key is another permutation. Or one for each position, uint64.

    Returns:
        int64, the shape of `positions`.

    Cost: O(len(positions)), whatever `size` is: a value takes fewer than four walks on average.
    """
    return _walk(_feistel, positions, size, key)


def unpermute(values: np.ndarray, size: int, key: int | np.ndarray) -> np.ndarray:
    """The positions that `permute` sends to some values; at the same price."""
    return _walk(_unfeistel, values, size, key)


def _walk(
    network: Callable[[np.ndarray, int, list[np.ndarray]], np.ndarray],
    values: np.ndarray,
    size: int,
    key: int | np.ndarray,
) -> np.ndarray:
    """Go through a network, again and again until each value is below `size`."""
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    begun = next_keys(0, key)
    keys = [next_keys(begun, number) for number in range(_ROUNDS)]
    reached = network(values.astype(np.uint64), half_bits, keys)
    while (outside := reached >= size).any():
        again = [part if part.size == 1 else part[outside] for part in keys]
        reached[outside] = network(reached[outside], half_bits, again)
    return reached.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, keys: list[np.ndarray]) -> np.ndarray:
    """Send values below 4 ** half_bits to each other; a key for each round, for all or for each."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) & mask)
    return left << shift | right


def _unfeistel(values: np.ndarray, half_bits: int, keys: list[np.ndarray]) -> np.ndarray:
    """Undo `_feistel`."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in reversed(keys):
        left, right = right ^ (mix64(left ^ key) & mask), left
    return left << shift | right


def derive_keys(keys: np.ndarray | int, part: np.ndarray | int) -> np.ndarray:
    """What `derive_key(key, part)` is, for many keys or parts."""
    return next_keys(next_keys(0, keys), part)


def next_keys(keys: np.ndarray | int, part: np.ndarray | int) -> np.ndarray:
    """What `derive_key(*parts, part)` is, given those of `parts`; for many of them."""
    sums = np.atleast_1d(np.asarray(keys, np.uint64)) + np.asarray(part, np.uint64)
    made: np.ndarray = mix64(sums + np.uint64(_GOLDEN))
    return made


@dataclass(frozen=True, slots=True)
class Draw:
    """What chance is made of within one window."""

    key: int
    """64 bits, other ones in every epoch."""
    cycle_key: int
    """64 bits that stay the same for a cycle of epochs, so that one epoch can avoid the other."""
    turn: int
    """The epoch's number within its cycle."""
    num_windows: int
    """Windows of the epoch: where there are many, chance decides already which rows share one."""


@dataclass(frozen=True, slots=True)
class Phase:
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
    phases: tuple[Phase, ...]
    """An epoch, one after the other; a single source has one."""
    seed: int
    shuffle: bool
    """False: record batches in the order of the files, every epoch the same."""

    @classmethod
    def of_one(cls, num_batches: int, num_windows: int, *, seed: int, shuffle: bool) -> Self:
        """The order of a single source."""
        return cls((num_batches,), (Phase((0,), (num_batches,), num_windows),), seed, shuffle)

    @property
    def num_windows(self) -> int:
        """Windows of an epoch."""
        return sum(phase.num_windows for phase in self.phases)

    @property
    def batches_read(self) -> tuple[int, ...]:
        """Record batches of each source in an epoch; more than it has where it is repeated."""
        return tuple(map(sum, zip(*(phase.batches for phase in self.phases), strict=True)))

    def window(self, epoch: int, window: int) -> np.ndarray:
        """Record batches of one window, counted over all sources one after the other, (K,), int64.

        Ascending in a source, so that a shard is opened once. Windows are as even as can be: in a
        phase K differs by at most one for each source.
        """
        for phase in self.phases:
            if window < phase.num_windows:
                break
            window -= phase.num_windows
        parts, first = [], 0
        for source, size in enumerate(self.sizes):
            start, stop = (
                phase.begins[source] + phase.batches[source] * edge // phase.num_windows
                for edge in (window, window + 1)
            )
            parts.append(first + np.sort(self._batches(source, epoch, start, stop)))
            first += size
        return np.concatenate(parts)

    def draw(self, epoch: int, window: int) -> Draw | None:
        """All randomness inside one window; None without any."""
        if not self.shuffle:
            return None
        cycle, turn = divmod(epoch, CYCLE)
        cycle_key = derive_key(self.seed, cycle, window, CYCLE)
        return Draw(derive_key(self.seed, epoch, window), cycle_key, turn, self.num_windows)

    def _batches(self, source: int, epoch: int, start: int, stop: int) -> np.ndarray:
        """Places `start` up to `stop` of a source's epoch; beyond its size it begins again."""
        size = self.sizes[source]
        turn, place = np.divmod(np.arange(start, stop), size)
        if start == stop or not self.shuffle:
            return place
        keys = next_keys(derive_key(self.seed, epoch, source), turn)
        offset = derive_keys(keys, 3) % np.uint64(size)  # strata lie elsewhere in every epoch
        batches: np.ndarray = _stratified(place, size, self.rounds_of(source), keys)
        return (batches + offset.astype(np.int64)) % size

    def rounds_of(self, source: int) -> int:
        """Windows in which a source is read once, at the pace of the first that reads it."""
        size = self.sizes[source]
        windows, batches = next(
            (phase.num_windows, phase.batches[source])
            for phase in self.phases
            if phase.batches[source]
        )
        return min(size, max(1, round(size * windows / batches)))


def _stratified(places: np.ndarray, size: int, num_rounds: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of range(size) of which every round, a run of places, has one of each stratum.

    Round r has the places from size * r // num_rounds on. Strata are runs of `num_rounds` values;
    the last may be shorter, and then has a value for some of the rounds only. Which stratum comes
    first within a round is random too, for a window may end within one.

    Args:
        places: Which places, shape (K,), int64.
        size: Length of the permuted range.
        num_rounds: At most `size`.
        keys: 64 bits for each place, uint64; another key is another permutation.
    """
    rounds = (num_rounds * (places + 1) - 1) // size
    begins = size * rounds // num_rounds
    sizes = size * (rounds + 1) // num_rounds - begins
    strata = np.empty(len(places), np.int64)
    for count in np.unique(sizes).tolist():  # two at most
        chosen = sizes == count
        of_round = derive_keys(derive_keys(keys[chosen], 0), rounds[chosen])
        strata[chosen] = permute((places - begins)[chosen], count, of_round)
    full = size // num_rounds
    values = np.empty(len(places), np.int64)
    is_full = strata < full
    of_stratum = derive_keys(derive_keys(keys[is_full], 1), strata[is_full])
    values[is_full] = permute(rounds[is_full], num_rounds, of_stratum)
    nth = (begins - rounds * full)[~is_full]  # rounds before that had a value of the last stratum
    values[~is_full] = permute(nth, max(1, size % num_rounds), derive_keys(keys[~is_full], 2))
    made: np.ndarray = strata * num_rounds + values
    return made
