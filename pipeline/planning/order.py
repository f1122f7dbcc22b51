"""The order of an epoch: the record batches of each window, as a pure function.

A window is a stratified sample of the source. With V windows, the record batches are cut into
strata of V neighbours, and every window takes one batch of each stratum, in an order of the
stratum's own. So even if a corpus is sorted by source, date or length, every window represents the
whole corpus. One epoch of 12 record batches in 3 windows:

    strata           0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
    first window         2   3         7     9
    second window    0           5   6          10
    third window       1       4         8         11

Permutations are evaluated only at the required places (`permutation`). So a start, a resume or a
new epoch costs the same for a thousand rows as for a trillion. Torch-free, no I/O.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import xxhash

from tokenfeed.pipeline.planning.permutation import (
    derive_key,
    derive_keys,
    next_keys,
    permute,
    unpermute,
)

CYCLE = 8
"""Epochs after which the strata of bands get new random starts; see `arrangement`."""


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


_MOST_SAVED = 10_000
"""Numbers of record batches in a state. A mixture of 1,000 data sets has a million."""


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

    @cached_property
    def saved(self) -> list[list[int]]:
        """Record batches of each source in each phase, as in a saved state; a checksum of them if
        they are many."""
        phases = [list(phase.batches) for phase in self.phases]
        if len(phases) * len(self.sizes) <= _MOST_SAVED:
            return phases
        return [[xxhash.xxh3_64_intdigest(np.array(phases, np.int64).tobytes()) >> 1]]

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
        reading, place = np.divmod(places, sizes)
        keys = next_keys(next_keys(derive_key(self.seed, epoch), sources), reading)
        made: np.ndarray = (_stratified(place, sizes, rounds, keys) + _offsets(keys, sizes)) % sizes
        return made

    def _places_of(self, source: int, epoch: int, reading: int, batches: np.ndarray) -> np.ndarray:
        size, rounds = self.sizes[source], self._rounds[source]
        keys = next_keys(derive_key(self.seed, epoch, source), reading)
        values = (batches - _offsets(keys, size)) % size
        return reading * size + _unstratified(values, size, rounds, keys)

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
