"""The order: which record batches are in window w, as a function of the seed. Pure; no state.

A data set, a mixture, an epoch and a list of stages are the same thing: sources that hand out
record batches, each at a rate. A source has its record batches at places, in an endless order of
its own: a permutation of all of them, then another one, and so on. A place is a number, and
`evenly` gives the record batch of a place. So a row comes once in every reading of its source,
whatever the rates are. A stretch is a run of windows in which each source advances as its weight
says, in proportion to tokens. An epoch of a data set or a mixture is one stretch; a list of stages
is a stretch for each. The places of two sources of 6 and 4 record batches with equal tokens and
weights, in windows of about 4 record batches:

    repeat      first source    0 1 | 2 3 | 4 5     second source    0 1 | 2 3 | 4 5
    stop                        0 1 | 2 3                            0 1 | 2 3
    continue                    0 1 | 2 3 4 5                        0 1 2 | 3

At the edge of window w, a source has given the record batches up to

    floor(its tokens at that edge / tokens of its average record batch + a random part)

The part differs between sources, so that many sources with equal weights do not deliver their
record batches in the same windows. It is below 1, so an epoch of a source that is read whole has
each record batch once. Everything is integer arithmetic: exact, and equal on every machine.

The places before a window depend only on the stretches up to it, so the future of a list of stages
may change. A start, a resume and a new epoch cost the same for a thousand rows as
for a trillion. Torch-free, no I/O.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import ceil, lcm
from operator import itemgetter
from typing import Literal, NamedTuple, Self

import numpy as np

from tokenfeed.pipeline.planning.permutation import derive_key, evenly, next_keys

CYCLE = 8
"""Epochs after which the strata of bands get new random starts; see `arrangement`."""
ENDLESS = 1 << 62
"""Number of windows of a list whose last stage has no end."""
_PART = 32
"""Progress of a source is counted in parts of 2**-32 record batch."""
_SURE_BATCHES = 64
"""See `least_tokens`."""
_SAMPLE = 1 << 20
"""Windows of an endless stretch for its average."""

Exhausted = Literal["repeat", "stop", "continue"]
"""What happens when a source runs out while others do not.

    repeat    the source starts again, newly shuffled; the epoch ends when all sources were read
              once
    stop      the epoch ends; the other sources are not read to their end
    continue  the others continue without it; the epoch has every row of every source once
"""


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
    """Windows in which the sources are read about once."""

    def of_part(self, nth: int) -> Self:
        """Return the random keys of one part of the window."""
        keys = derive_key(self.key, nth), derive_key(self.cycle_key, nth)
        return replace(self, key=keys[0], cycle_key=keys[1])


class Source(NamedTuple):
    """The size of a data set."""

    batches: int
    """Number of record batches."""
    tokens: int

    @property
    def mean_tokens(self) -> Fraction:
        """Tokens of the average record batch."""
        return Fraction(self.tokens, self.batches)


class _Pace(NamedTuple):
    """How fast sources advance from some progress on."""

    begins: Fraction
    """Tokens of the stretch from which it holds."""
    ended: int
    """Tokens of the sources that were read to their end by then."""
    running: int
    """Sum of the weights of the others."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Windows in which the sources keep one proportion."""

    num_windows: int
    window_tokens: Fraction
    """Tokens of a window. The last one ends with the stretch."""
    tokens: Fraction
    """Tokens of the stretch."""
    weights: Mapping[int, int]
    """Weight of each source, by its number: whole numbers, of tokens."""
    paces: tuple[_Pace, ...]
    """One; or, if sources end before others, one for each end."""
    per_reading: int
    """Windows in which the sources are read about once; see `Draw.num_windows`."""
    is_once: bool = False
    """Whether no source is read twice: the others go on without those that have ended."""

    @classmethod
    def of_stage(
        cls,
        sources: Sequence[Source],
        weights: Mapping[int, Fraction],
        window_tokens: int,
        num_windows: int,
        tokens: int,
    ) -> Self:
        """Return a stage.

        Args:
            sources: All sources.
            weights: Weight of each source of the stage, by its number.
            window_tokens: Tokens of a window.
            num_windows: Windows of the stage; `ENDLESS` without an end.
            tokens: Tokens of the stage.
        """
        whole, unit = integers(weights), Fraction(window_tokens)
        # An epoch of one window has length bands of its own, for rows that come again each epoch.
        once = max(2, round(sum(sources[number].tokens for number in weights) / window_tokens))
        pace = _Pace(Fraction(0), 0, sum(whole.values()))
        return cls(num_windows, unit, Fraction(tokens), whole, (pace,), once)

    @classmethod
    def of_epoch(
        cls,
        sources: Sequence[Source],
        weights: Sequence[Fraction],
        window_tokens: int,
        exhausted: Exhausted,
    ) -> Self:
        """Return an epoch of a data set or a mixture, in windows of about `window_tokens`."""
        whole = integers(dict(enumerate(weights)))
        ends = sorted((Fraction(sources[n].tokens, weight), n) for n, weight in whole.items())
        paces = [_Pace(Fraction(0), 0, sum(whole.values()))]
        if exhausted == "continue":
            for end, number in ends:
                _, ended, running = paces[-1]
                left = running - whole[number]
                progress = ended + end * running
                paces.append(_Pace(progress, ended + sources[number].tokens, left))
            tokens = paces.pop().begins
            alone = [ends[-1][1]]  # it runs in every window, and never slower than in the first
        else:
            tokens = ends[-1 if exhausted == "repeat" else 0][0] * paces[0].running
            alone = list(whole)
        most = int(tokens / least_tokens(sources, whole, alone))
        windows = max(1, min(most, round(tokens / window_tokens)))
        once = exhausted == "continue"
        return cls(windows, tokens / windows, tokens, whole, tuple(paces), windows, once)

    def parts(self, sources: Sequence[Source], edge: int) -> dict[int, int]:
        """Return how far each source has come at an edge of a window, in parts of a record batch.

        Args:
            sources: All sources.
            edge: Number of windows before the edge.
        """
        at = self.tokens if edge >= self.num_windows else edge * self.window_tokens
        pace = self.paces[bisect_right(self.paces, at, key=itemgetter(0)) - 1]
        above, below = ((at - pace.ended) / pace.running).as_integer_ratio()  # tokens of weight 1
        found = {
            number: (weight * above * sources[number].batches << _PART)
            // (below * sources[number].tokens)
            for number, weight in self.weights.items()
        }
        if self.is_once:
            return {n: min(parts, sources[n].batches << _PART) for n, parts in found.items()}
        return found


def integers(weights: Mapping[int, Fraction]) -> dict[int, int]:
    """Return the least whole numbers in the same proportion."""
    unit = lcm(*(weight.denominator for weight in weights.values()))
    return {number: int(weight * unit) for number, weight in weights.items()}


def least_tokens(
    sources: Sequence[Source], weights: Mapping[int, int], alone: Iterable[int]
) -> int:
    """Return a number of tokens in which at least one source gives a record batch.

    A source gives one in its average record batch divided by its share. S sources together give
    more than S record batches in S + 1 average ones, less one of each that has just begun. Many
    sources begin at random parts of a record batch: with a probability of e**-64, none of them
    gives one in 64 average ones.

    Args:
        sources: All sources.
        weights: Weight of each source that is read.
        alone: Sources that keep at least their share all the time.
    """
    whole = sum(weights.values())
    sizes = [sources[number].mean_tokens * whole / weights[number] for number in alone]
    together = max(sources[number].mean_tokens for number in weights)
    return ceil(min([together * min(len(weights) + 1, _SURE_BATCHES), *sizes]))


class Average(NamedTuple):
    """A stretch with its average window."""

    first_window: int
    num_windows: int
    batches: tuple[float, ...]
    """Record batches of each source in an average window."""


@dataclass(frozen=True)
class Schedule:
    """The record batches of every window. An epoch is one pass through all stretches."""

    sources: tuple[Source, ...]
    stretches: tuple[Stretch, ...]
    seed: int
    shuffle: bool
    """False: every reading has the record batches in file order."""
    keeps_rows: bool = False
    """Whether a window has its record batches in the order of reading, for `order`="file"."""

    @cached_property
    def first_windows(self) -> tuple[int, ...]:
        """First window of each stretch."""
        counts = [stretch.num_windows for stretch in self.stretches]
        return tuple(accumulate(counts[:-1], initial=0))

    @property
    def num_windows(self) -> int:
        """Number of windows of an epoch; `ENDLESS` without an end."""
        return min(ENDLESS, self.first_windows[-1] + self.stretches[-1].num_windows)

    @property
    def batches_read(self) -> tuple[int, ...]:
        """Record batches of each source in an epoch that ends; more than its size if it repeats."""
        found = [0] * len(self.sources)
        for number, (_, stop) in self.places(self.num_windows - 1).items():
            found[number] = stop
        return tuple(found)

    @property
    def averages(self) -> tuple[Average, ...]:
        """All stretches with their average windows."""
        found = []
        for first, stretch in zip(self.first_windows, self.stretches, strict=True):
            windows = min(stretch.num_windows, _SAMPLE)
            parts = stretch.parts(self.sources, windows)
            mean = [parts.get(n, 0) / windows / (1 << _PART) for n in range(len(self.sources))]
            found.append(Average(first, stretch.num_windows, tuple(mean)))
        return tuple(found)

    def stretch_of(self, window: int) -> int:
        """Return the number of the stretch of a window."""
        return bisect_right(self.first_windows, window) - 1

    def draw(self, epoch: int, window: int) -> Draw | None:
        """Return the random keys of a window; None without shuffling."""
        if not self.shuffle:
            return None
        cycle, cycle_epoch = divmod(epoch, CYCLE)
        keys = derive_key(self.seed, epoch, window), derive_key(self.seed, cycle, window, CYCLE)
        return Draw(*keys, cycle_epoch, self.stretches[self.stretch_of(window)].per_reading)

    def places(self, window: int) -> dict[int, tuple[int, int]]:
        """Return the first place of each source in a window, and the place after its last."""
        number = self.stretch_of(window)
        stretch, nth = self.stretches[number], window - self.first_windows[number]
        before, begun = self._before[number], self._begun
        first, stop = (stretch.parts(self.sources, nth + end) for end in (0, 1))
        found = {}
        for source, at in first.items():
            given = before[source] + begun[source]
            found[source] = (given + at) >> _PART, (given + stop[source]) >> _PART
        return found

    def window(self, epoch: int, window: int) -> np.ndarray:
        """Return the record batches of a window, counted over all sources, shape (K,), int64.

        They ascend in each source, so that a shard is opened once; with `keeps_rows`, they have the
        order of reading.
        """
        places = sorted(self.places(window).items())
        counts = [stop - start for _, (start, stop) in places]
        sources = np.repeat([source for source, _ in places], counts)
        at = np.concatenate([np.arange(start, stop) for _, (start, stop) in places])
        sizes = np.array([source.batches for source in self.sources])
        if self.shuffle:
            keys = next_keys(derive_key(self.seed, epoch), sources)
            batches = evenly(at, sizes[sources], keys)
        else:
            batches = at % sizes[sources]
        batches = batches + (np.cumsum(sizes) - sizes)[sources]
        return batches if self.keeps_rows else np.sort(batches)

    @cached_property
    def _begun(self) -> tuple[int, ...]:
        """The random part of each source: below a record batch."""
        count = range(len(self.sources))
        return tuple(derive_key(self.seed, number, CYCLE) >> 64 - _PART for number in count)

    @cached_property
    def _before(self) -> tuple[tuple[int, ...], ...]:
        """How far each source has come before each stretch, in parts of a record batch."""
        found = [(0,) * len(self.sources)]
        for stretch in self.stretches[:-1]:
            parts = stretch.parts(self.sources, stretch.num_windows)
            found.append(tuple(at + parts.get(n, 0) for n, at in enumerate(found[-1])))
        return tuple(found)
