"""Stages: parts of a run with their own weights. Stages that a run has not read may still change.

    [Stage({"prose/": 0.8, "code/": 0.2}, until_tokens=10_000_000_000),
     Stage({"prose/": 0.5, "math/": 0.5})]

Every source has an endless order of its own: its record batches in a permutation, then all of them
in another one, and so on. A stage decides only how fast each source advances. So a source goes on
where the stage before left it. At the end of every window, no row has come twice before its source
was read to its end. The window in which a reading ends mixes rows of both readings.

The progress of a run is counted in tokens: every record batch counts as many as the source has on
average. At a progress of t tokens, a source has given the record batches up to

    floor(tokens of the source so far / tokens of its average record batch + a random part)

so its share is exact to one record batch at any time. Windows lie between multiples of
`window_tokens` from the beginning of their stage; the last window of a stage ends with the stage,
and has between half and one and a half times as many.

Everything at a window depends on the stages up to this window only, never on later ones. That is
why the future of a list can change. So the order of a source does not depend on its share: any of
its record batches in a row lie evenly in the source (`order.evenly`). And the width of the length
bands comes from the sources and `window_tokens` of a stage. Torch-free, no I/O.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import ceil, lcm
from os import PathLike
from os.path import realpath
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import xxhash

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.manifest import canonical
from tokenfeed.pipeline.format.store import Store, StorePath
from tokenfeed.pipeline.planning.mixture import Mixture, are_folders, checked_weights, proportions
from tokenfeed.pipeline.planning.order import CYCLE, Draw, SourceOrder, Stretch
from tokenfeed.pipeline.planning.permutation import (
    derive_key,
    evenly,
    evenly_inverse,
    next_keys,
)
from tokenfeed.pipeline.planning.policies import Batching, describe, policy_of

_Given = TypeVar("_Given")
ENDLESS = 1 << 62
"""Number of windows of a list whose last stage has no end."""
_SCALE = 20
"""Tokens of a source are counted in parts of 2**-20 token: whole numbers for any weights."""
_MOST_WHOLE = 1 << 53
"""Largest whole number that a state has for a weight."""
_SURE_BATCHES = 64
"""See `least_tokens`."""
_LEAST_WINDOWS = 2
"""An epoch of one window has length bands of its own, for rows that come again in every epoch."""


@dataclass(frozen=True)
class Stage:
    """A part of a run: the share of each data set in the tokens, and where the stage ends.

    Stage({"prose/": 0.7, "code/": 0.3}, until_tokens=2_000_000_000)
    """

    weights: Mapping[StorePath, float]
    """Folder or URL -> share of the tokens. Only the proportions matter."""
    _: KW_ONLY
    until_tokens: int | None = None
    """Tokens of the run, since its beginning, at which the stage ends. None: the last stage has no
    end."""
    batching: Batching | None = None
    """How micro-batches are made. None: as the loader's `batching` says."""
    targets: str | Collection[str] | None = None
    """Which tokens of conversations are targets: "assistant", "last", "all", or kinds such as
    {"text", "call"}. None: as the loader's `targets` says."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", checked_weights(self.weights))
        if isinstance(self.targets, Collection) and not isinstance(self.targets, str):
            object.__setattr__(self, "targets", ",".join(sorted(map(str, self.targets))))
        elif self.targets is not None and not isinstance(self.targets, str):
            expected = "a word or a set of kinds; a function only as `targets` of the loader"
            raise checks.refusal("targets", self.targets, expected)
        if self.until_tokens is not None:
            until = checks.whole("until_tokens", self.until_tokens, least=1, most=1 << 61)
            object.__setattr__(self, "until_tokens", until)


def as_one(data: Any) -> Any:
    """Return a list of folders as a mixture in proportion to their sizes, and anything else as it
    is."""
    return Mixture(data) if are_folders(data) else data


def paths_of(data: StorePath | Mixture | Sequence[Stage]) -> list[StorePath]:
    """Return the paths of all data sets, in the order in which a run meets them.

    Raises:
        ConfigError: `data` is neither a path, nor a Mixture, nor a list of stages.
    """
    if isinstance(data, Mixture):
        return list(data.weights)
    if isinstance(data, str | PathLike | Store):
        return [data]
    stages: Sequence[object] = data if isinstance(data, Sequence) else ()
    folders = [folder for each in stages if isinstance(each, Stage) for folder in each.weights]
    if not stages or not all(isinstance(each, Stage) for each in stages):
        raise checks.refusal(
            "path", data, "a folder, a URL, a Mixture, or a list of folders or stages"
        )
    known: dict[object, StorePath] = {}
    for folder in folders:
        known.setdefault(place_of(folder), folder)
    return list(known.values())


def place_of(folder: StorePath) -> object:
    """Return the place of a data set, equal for all ways to write the path of a folder."""
    if isinstance(folder, str | PathLike) and "://" not in str(folder):
        return realpath(folder)
    return folder


def by_place(given: Mapping[StorePath, _Given]) -> dict[object, _Given]:
    """Return what is given for each data set by its place.

    Raises:
        ConfigError: A data set is named twice.
    """
    found: dict[object, _Given] = {}
    for folder, value in given.items():
        if place_of(folder) in found:
            raise ConfigError(
                f"{folder}: the same folder is named twice. Name it once, with the sum of its "
                "weights if it has some."
            )
        found[place_of(folder)] = value
    return found


_Weight = Annotated[int, msgspec.Meta(ge=0)] | Annotated[float, msgspec.Meta(ge=0)]
_Weights = Annotated[list[_Weight], msgspec.Meta(min_length=2)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 61)]


class SavedStage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stage in a saved state."""

    window_tokens: _Tokens
    weights: _Weights
    """A divisor, and the weight of each of the plan's data sets times the divisor, because small
    whole numbers take one byte."""
    until: _Tokens | None = None
    batching: str | None = None
    """None: as in the stage before."""
    targets: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage with its place in the run. Its data sets are named by fingerprint."""

    begins: int
    """Tokens of the run at its beginning."""
    until: int | None
    """Tokens of the run at its end; None without an end."""
    window_tokens: int
    weights: Mapping[str, float]
    batching: Batching
    targets: str | None = None
    """See `Stage.targets`."""

    @property
    def num_windows(self) -> int:
        """Windows of the stage; `ENDLESS` without an end."""
        if self.until is None:
            return ENDLESS
        return max(1, (self.until - self.begins + self.window_tokens // 2) // self.window_tokens)

    def edge(self, nth: int) -> int:
        """Return the tokens of the run at the beginning of the stage's nth window, or its end."""
        if self.until is not None and nth >= self.num_windows:
            return self.until
        return self.begins + nth * self.window_tokens


def saved_stages(stages: Sequence[PlannedStage], data: Sequence[str]) -> list[SavedStage]:
    """Return stages for a saved state."""
    policies = [None, *(stage.batching for stage in stages)]
    return [
        SavedStage(
            stage.window_tokens,
            _listed(stage.weights, data),
            stage.until,
            None if stage.batching == before else describe(stage.batching),
            stage.targets,
        )
        for stage, before in zip(stages, policies, strict=False)
    ]


def _listed(weights: Mapping[str, float], data: Sequence[str]) -> list[float]:
    """Return weights in the order of the data sets, as in `SavedStage.weights`."""
    listed = [weights.get(each, 0) for each in data]
    whole, total, divisor = _integers(listed)
    return [1, *listed] if max(total, divisor) > _MOST_WHOLE else [divisor, *whole]


def planned_stages(saved: Sequence[SavedStage], data: Sequence[str]) -> tuple[PlannedStage, ...]:
    """Return the stages of a saved plan: the inverse of `saved_stages`.

    Raises:
        ResumeError: The list is damaged.
    """
    stages: list[PlannedStage] = []
    begins, batching = 0, ""
    for number, each in enumerate(saved, 1):
        divisor, *weights = each.weights
        has_weights = len(weights) == len(data) and divisor and sum(weights)
        is_after = (each.until or ENDLESS) > begins
        has_end = each.until or number == len(saved)
        if not (has_weights and is_after and has_end):
            raise ResumeError(
                f"cannot resume: stage {number} of the state is damaged. Use an unchanged state."
            )
        batching = each.batching or batching
        stages.append(
            PlannedStage(
                begins,
                each.until,
                each.window_tokens,
                {of: weight / divisor for of, weight in zip(data, weights, strict=True) if weight},
                policy_of(batching),
                each.targets,
            )
        )
        begins = each.until or ENDLESS
    return tuple(stages)


class _Rates(NamedTuple):
    """How fast a stage reads its sources, as whole numbers.

    After x tokens of the stage, a source has got of[source] * x / whole.
    """

    of: dict[int, int]
    """The weight of each source, in ascending order of the sources."""
    whole: int
    """The sum of the weights."""
    shares: dict[int, float]
    """Share of each source."""


def _rates_of(stage: PlannedStage, numbers: Mapping[str, int]) -> _Rates:
    data = sorted(stage.weights, key=numbers.__getitem__)
    weights, whole, _ = _integers([stage.weights[each] for each in data])
    of = {numbers[each]: weight for each, weight in zip(data, weights, strict=True)}
    return _Rates(of, whole, {source: weight / whole for source, weight in of.items()})


def _integers(weights: Sequence[float]) -> tuple[tuple[int, ...], int, int]:
    """Return the least whole numbers that are the weights, as written, times a divisor; their sum;
    and the divisor."""
    exact = [Fraction(str(weight)) for weight in weights]
    unit = lcm(*(weight.denominator for weight in exact))
    whole = tuple(int(weight * unit) for weight in exact)
    return whole, sum(whole), unit


@dataclass(frozen=True)
class StagedOrder(SourceOrder):
    """The order of a list of stages.

    An epoch is one pass through the list. A list without an end has one epoch.
    """

    data: tuple[str, ...]
    """Fingerprint of each source. The order of a source depends on it, not on other sources."""
    tokens: tuple[int, ...]
    """Tokens of each source."""
    stages: tuple[PlannedStage, ...]
    first_windows: tuple[int, ...] = field(init=False)
    """First window of each stage."""

    def __post_init__(self) -> None:
        counts = [stage.num_windows for stage in self.stages]
        object.__setattr__(self, "first_windows", tuple(accumulate(counts[:-1], initial=0)))

    @property
    def num_windows(self) -> int:
        """Number of windows of the list."""
        return min(ENDLESS, self.first_windows[-1] + self.stages[-1].num_windows)

    @property
    def batch_tokens(self) -> dict[str, Fraction]:
        """Average tokens of a record batch of each data set, by fingerprint."""
        return dict(zip(self.data, map(Fraction, self.tokens, self.sizes), strict=True))

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """The stages, each with its average window."""
        found = []
        for first, stage, rates in zip(self.first_windows, self.stages, self._rates, strict=True):
            average = [0.0] * len(self.sizes)
            tokens = float(stage.window_tokens)
            if stage.until is not None:
                tokens = (stage.until - stage.begins) / stage.num_windows
            for source, share in rates.shares.items():
                average[source] = self._per_token(source, share) * tokens
            found.append(Stretch(first, stage.num_windows, tuple(average)))
        return tuple(found)

    def stage_of(self, window: int) -> PlannedStage:
        """Return the stage of a window."""
        return self.stages[self._number(window)]

    def edge(self, window: int) -> int:
        """Return the tokens of the run at the beginning of a window."""
        number = self._number(window)
        return self.stages[number].edge(window - self.first_windows[number])

    def given(self, source: int, tokens: int) -> int:
        """Return how many record batches of a source are delivered in the run's first `tokens`
        tokens."""
        begins = [stage.begins for stage in self.stages]
        return self._given(bisect_right(begins, tokens) - 1, source, tokens)

    def places(self, source: int, window: int) -> tuple[int, int]:
        """Return the first place of a source in a window, and the place after the last."""
        number = self._number(window)
        stage, nth = self.stages[number], window - self.first_windows[number]
        start, stop = (self._given(number, source, stage.edge(nth + end)) for end in (0, 1))
        return start, stop

    def draw(self, epoch: int, window: int) -> Draw | None:
        """Return the random keys of a window; None without shuffling."""
        if not self.shuffle:
            return None
        number = self._number(window)
        tokens = sum(self.tokens[source] for source in self._rates[number].of)
        num_windows = max(_LEAST_WINDOWS, round(tokens / self.stages[number].window_tokens))
        cycle_key = derive_key(self.seed, epoch, window, CYCLE)
        key = derive_key(self.seed, epoch, window)
        return Draw(key, cycle_key, 0, num_windows, is_even=True)

    def windows_of(self, source: int, places: np.ndarray) -> np.ndarray:
        """Return about the window of each place in a source's order; -1 for a place without one.

        Exact to one window while shares stay. A cache that is off by some reads no wrong rows.
        """
        windows = np.full(len(places), -1)
        begins = self._begin_places[source]
        stages = np.searchsorted(np.array(begins, np.int64), places, side="right") - 1
        for number in np.unique(stages).tolist():
            stage, share = self.stages[number], self._rates[number].shares.get(source)
            if not share:
                continue
            chosen = stages == number
            per_window = self._per_token(source, share) * stage.window_tokens
            nth = ((places[chosen] - begins[number]) / per_window).astype(np.int64)
            windows[chosen] = self.first_windows[number] + np.minimum(nth, stage.num_windows - 1)
        return windows

    def _shuffled(self, sources: np.ndarray, epoch: int, places: np.ndarray) -> np.ndarray:
        fingerprints = np.array([int(each, 16) for each in self.data], np.uint64)
        keys = next_keys(derive_key(self.seed, epoch), fingerprints)
        return evenly(places, np.array(self.sizes)[sources], keys[sources])

    def _places_of(self, source: int, epoch: int, reading: int, batches: np.ndarray) -> np.ndarray:
        return evenly_inverse(batches, self.sizes[source], self._key_of(source, epoch), reading)

    def _given(self, number: int, source: int, tokens: int) -> int:
        """Return the record batches that a source has given at a place in a stage."""
        return self._batches(
            source, self._parts[number][source] + self._of_stage(number, source, tokens)
        )

    def _batches(self, source: int, parts: int) -> int:
        """Return the record batches of a source that has got parts of 2**-20 token.

        Each source begins at a random part of a record batch. Otherwise many sources with equal
        weights would deliver their record batches in the same windows.
        """
        batch = self.tokens[source] << _SCALE
        begun = derive_key(self.seed, int(self.data[source], 16), CYCLE) * batch >> 64
        return (parts * self.sizes[source] + begun) // batch

    def _of_stage(self, number: int, source: int, tokens: int) -> int:
        """Return what a source has got from one stage, in parts of 2**-20 token."""
        rates = self._rates[number]
        if source not in rates.of:
            return 0
        passed = tokens - self.stages[number].begins
        return (rates.of[source] * passed << _SCALE) // rates.whole

    def _number(self, window: int) -> int:
        """Return the number of the stage of a window."""
        return bisect_right(self.first_windows, window) - 1

    def _key_of(self, source: int, epoch: int) -> int:
        """Return the key of the permutations of a source. It does not depend on other sources."""
        return derive_key(self.seed, epoch, int(self.data[source], 16))

    def _per_token(self, source: int, share: float) -> float:
        """Return the record batches of a source in a token of the run."""
        return share * self.sizes[source] / self.tokens[source]

    @cached_property
    def saved(self) -> list[SavedStage]:
        """All stages for a saved state."""
        return saved_stages(self.stages, self.data)

    @cached_property
    def _rates(self) -> tuple[_Rates, ...]:
        numbers = {data: number for number, data in enumerate(self.data)}
        return tuple(_rates_of(stage, numbers) for stage in self.stages)

    @cached_property
    def _parts(self) -> tuple[tuple[int, ...], ...]:
        """Parts of 2**-20 token that each source has got before each stage."""
        parts = [[0] * len(self.sizes)]
        for number, stage in enumerate(self.stages[:-1]):
            after = list(parts[-1])
            for source in self._rates[number].of:
                after[source] += self._of_stage(number, source, stage.edge(stage.num_windows))
            parts.append(after)
        return tuple(map(tuple, parts))

    @cached_property
    def _begin_places(self) -> tuple[tuple[int, ...], ...]:
        """Place of each source at the beginning of each stage."""
        return tuple(
            tuple(self._batches(source, parts[source]) for parts in self._parts)
            for source in range(len(self.sizes))
        )


def data_of(stages: Iterable[PlannedStage]) -> tuple[str, ...]:
    """Return the fingerprints of all data sets, in the order in which a run meets them."""
    return tuple(dict.fromkeys(data for stage in stages for data in stage.weights))


def digest_of(stages: Sequence[PlannedStage]) -> str:
    """Return a short name of a list, to recognise the same list again."""
    data = sorted(data_of(stages))
    saved = msgspec.to_builtins(saved_stages(stages, data))
    return xxhash.xxh3_64_hexdigest(canonical({"data": data, "stages": saved}))


def least_tokens(stage: PlannedStage, batch_tokens: Mapping[str, Fraction]) -> int:
    """Return a number of tokens in which at least one source of a stage delivers a record batch.

    A source gives one in its average record batch divided by its share. S sources together give
    more than S record batches in S + 1 average ones, less one of each that has just begun. Many
    sources begin at random parts of a record batch: with a probability of e**-64, none of them
    gives one in 64 average ones.

    Args:
        stage: The stage.
        batch_tokens: Average tokens of a record batch of each data set, by fingerprint.
    """
    sizes = [batch_tokens[data] for data in stage.weights]
    weights, whole, _ = _integers(list(stage.weights.values()))
    alone = [size * whole / weight for size, weight in zip(sizes, weights, strict=True)]
    together = min(len(sizes) + 1, _SURE_BATCHES) * max(sizes)
    return ceil(min([together, *alone])) + 1  # 1: parts of a token are rounded down


def going_on(
    ours: Sequence[PlannedStage],
    saved: Sequence[PlannedStage],
    windows: int,
    names: Mapping[str, str],
) -> tuple[PlannedStage, ...]:
    """Return the stages of a resumed run: saved stages as far as they were read, then stages of
    `ours`.

    Args:
        ours: The list of the run that resumes.
        saved: The list of the run that was saved.
        windows: Number of windows that the saved run has begun.
        names: Names of the data sets by fingerprint, for messages.

    Raises:
        ResumeError: The lists differ before the position. The message names the first difference.
    """
    past: list[PlannedStage] = []
    stop = 0
    for stage in saved:
        if windows <= 0:
            break
        past.append(stage)
        stop = stage.edge(windows)
        windows -= stage.num_windows
    _check_past(ours, past, stop, names)
    future = [stage for stage in ours if stage.until is None or stage.until > stop]
    if past and future and future[0].begins == past[-1].begins:
        passed = windows + past[-1].num_windows  # windows of the stage that were begun
        if future[0].edge(passed) == stop:  # the same windows so far: at most its end has moved
            return (*past[:-1], *future)
    if past and past[-1].until != stop:
        past[-1] = replace(past[-1], until=stop)
    if future and future[0].begins < stop:
        future[0] = replace(future[0], begins=stop)
    return (*past, *future)


def _check_past(
    ours: Sequence[PlannedStage],
    past: Sequence[PlannedStage],
    stop: int,
    names: Mapping[str, str],
) -> None:
    """Check that both lists say the same up to a place.

    The lists are compared between the ends of their stages, because one list may have cut a stage
    of the other in two.
    """
    edges = {edge for stage in (*ours, *past) for edge in (stage.begins, stage.until or ENDLESS)}
    for begins in sorted(edge for edge in edges if edge < stop):
        theirs = _stage_at(past, begins)
        mine = _stage_at(ours, begins)
        if mine is None or theirs is None:
            raise ResumeError(
                f"cannot resume: this list of stages ends at token {ours[-1].until:,}, but the run "
                f"has read up to token {stop:,}. Lengthen the list."
            )
        our, their = _facts(mine, names), _facts(theirs, names)
        for what in {**their, **our}:
            if our.get(what, 0) != their.get(what, 0):
                raise ResumeError(
                    f"cannot resume: from token {begins:,} on, {what} is {our.get(what, 'none')} "
                    f"in this list of stages, but was {their.get(what, 'none')} in the run, which "
                    f"has read up to token {stop:,}. Change only what comes after."
                )


def _stage_at(stages: Sequence[PlannedStage], token: int) -> PlannedStage | None:
    return next((stage for stage in stages if stage.until is None or stage.until > token), None)


def _facts(stage: PlannedStage, names: Mapping[str, str]) -> dict[str, object]:
    """Return what the order of a stage depends on, by its name in messages. A missing share
    is 0."""
    shares = zip(stage.weights, proportions(stage.weights.values()), strict=True)
    facts: dict[str, object] = {
        f"the share of {names.get(data, data)}": share for data, share in shares
    }
    return facts | {
        "`batching`": stage.batching,
        "`window_tokens`": f"{stage.window_tokens:,}",
    }
