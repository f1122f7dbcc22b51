"""The plan: the order of all rows, from the manifests and a few settings.

A run's position is three integers, and the plan computes the rest from them. Two loaders with equal
plans deliver the same micro-batches in the same order, for any ranks, workers, prefetching and
devices. Torch-free.
"""

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

import msgspec
import numpy as np

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.kinds import TargetRule
from tokenfeed.pipeline.format.schema import role_of
from tokenfeed.pipeline.format.store import Store, StorePath
from tokenfeed.pipeline.planning.mixture import Mixture, proportions
from tokenfeed.pipeline.planning.policies import POLICIES, Batching, offered, saved_policy
from tokenfeed.pipeline.planning.resized import Earlier
from tokenfeed.pipeline.planning.schedule import ENDLESS, Exhausted, Schedule, Source, Stretch
from tokenfeed.pipeline.planning.stages import (
    History,
    PlannedStage,
    SavedStage,
    Stage,
    by_place,
    data_of,
    digest_of,
    filled_as,
    paths_of,
    place_of,
    planned_stages,
    saved_stages,
)

_LEAST_WINDOW_TOKENS, _MOST_WINDOW_TOKENS = 1 << 23, 1 << 25
"""Smallest and largest default window in tokens. The smallest has about 128 record batches, so it
mixes rows of 128 places of the corpus."""
_LEAST_OF_STAGES, _MOST_ROWS_OF_STAGES = 3 << 22, 1_600_000
"""Smallest default window of a list of stages, and the rows that it has at most."""
_WINDOW_ROWS = 400_000
"""Largest number of rows of the smallest default window, because rows cost time and memory too."""
_WINDOW_STEPS = 256
"""Number of steps in a default window."""
_WINDOW_BATCHES, _MOST_FOR_SOURCES = 5, 1 << 24
"""Record batches of a mixture's smallest source in a default window, if that takes at most this
many tokens."""


class Position(NamedTuple):
    """Position of the next micro-batch, counted over all ranks."""

    epoch: int
    window: int
    micro_batch: int
    """Number of delivered micro-batches of the window."""


_SKIP = "a dict from folders to lists of ranges, such as {'out/': [(3, 5)]}"
RowOrder = Literal["shuffled", "file"]
"""Order of rows: planned by a seed, or exactly that of the data set."""
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class PlanSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings that define a plan, as in a saved state."""

    data: list[str]
    batching: dict[str, Any]
    """See `saved_policy`."""
    micro_batches_per_step: Annotated[int, msgspec.Meta(ge=1, le=checks.MOST)]
    split: str
    seed: int
    stream: Annotated[int, msgspec.Meta(ge=0)] = 0
    num_streams: _Positive = 1
    shuffle: bool = True
    weights: list[Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]] | None = None
    batches: list[_Positive] | None = None
    """Record batches of each source in an epoch."""
    windows: _Positive | None = None
    window_tokens: _Positive | None = None
    exhausted: Exhausted | None = None
    stages: Annotated[list[SavedStage], msgspec.Meta(min_length=1)] | None = None
    given: str = ""
    """See `Plan.given`."""
    order: Literal["file"] | None = None
    skip: dict[str, list[tuple[int, int]]] | None = None
    """See `Plan.skip`."""
    earlier: list[tuple[dict[str, Any], _Positive, _Positive]] = []
    """See `Plan.earlier`, of the window of the state."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The order of all rows."""

    data: tuple[str, ...]
    """Fingerprint of each source's manifest."""
    weights: tuple[float, ...]
    """Weight of each source. Only the proportions matter. Empty if the plan has stages."""
    row_ends: tuple[int, ...]
    """Running total of the rows of the sources."""
    epoch_tokens: tuple[int | None, ...]
    """Tokens of each source in an epoch; None if the plan does not know them."""
    split: str
    batching: Batching
    """Policy of the windows; of a stage without one of its own, if the plan has stages."""
    micro_batches_per_step: int
    order: Schedule
    stream: int
    """The stream has the windows whose number is `stream` modulo `num_streams`."""
    num_streams: int
    window_tokens: int
    """Intended tokens of a window."""
    exhausted: Exhausted
    """What ends an epoch of a mixture."""
    stages: tuple[PlannedStage, ...] = ()
    """The list of stages; empty if the plan has none."""
    given: str = ""
    """Name of the list of stages as the user gave it, before `reweigh` or a resume changed it."""
    skip: Mapping[str, list[tuple[int, int]]] | None = None
    """Rows that no loss counts: ranges (first row, row after the last) of each source, by
    fingerprint. None: the ranges of a state that is loaded."""
    earlier: tuple[tuple[int, int], tuple[Earlier, ...]] = ((0, 0), ())
    """Epoch and window in which a resumed run has changed micro-batches or steps, and how the
    window was read before."""
    part: int | None = None
    """Tokens of an epoch to deliver, of random rows of its first windows; None: all."""

    @classmethod
    def from_splits(
        cls,
        sources: tuple[OpenedSplit, ...],
        data: StorePath | Mixture | Sequence[Stage],
        batching: Batching,
        *,
        split: str,
        micro_batches_per_step: int,
        window_tokens: int | None,
        seed: int,
        shuffle: bool,
        order: RowOrder = "shuffled",
        stream: int = 0,
        num_streams: int = 1,
        skip: Mapping[StorePath, Iterable[Any]] | None = None,
    ) -> Self:
        """Make the plan of some data. `sources` are the opened `paths_of(data)`. See `ShardLoader`
        for the other arguments.

        Raises:
            ConfigError: The settings contradict each other or do not fit the data.
        """
        _check_policy(batching)
        step_size = checks.whole(
            "micro_batches_per_step", micro_batches_per_step, least=1, most=checks.MOST
        )
        if window_tokens is not None:
            window_tokens = checks.whole("window_tokens", window_tokens, least=1, other=", or None")
        _check_columns(sources[0])
        sizes = tuple(Source(source.batches, source.tokens) for source in sources)
        keeps_rows = checks.choice("order", order, get_args(RowOrder)) == "file"
        seed, shuffle = checks.seed(seed), checks.flag("shuffle", shuffle) and not keeps_rows
        opened = by_place(dict(zip(paths_of(data), sources, strict=True)))
        by_data = _refuse_equal(sources)
        weights: tuple[float, ...] = ()
        planned: tuple[PlannedStage, ...] = ()
        exhausted: Exhausted = "continue"
        given = ""
        if isinstance(data, str | PathLike | Store | Mixture):
            weights = (1.0,)
            if isinstance(data, Mixture):
                weights, exhausted = data.weights_of(sources), data.exhausted
            _check_fit(sources, batching)
            if window_tokens is None:
                window_tokens = default_window_tokens(sources, weights, batching, step_size)
            epoch = Stretch.of_epoch(sizes, proportions(weights), window_tokens, exhausted)
            stretches: tuple[Stretch, ...] = (epoch,)
        else:
            planned = _planned(data, opened, batching, window_tokens, step_size)
            numbers = {each: number for number, each in enumerate(by_data)}
            stretches = tuple(stage.stretch(sizes, numbers) for stage in planned)
            given = digest_of(planned)
        ordered = Schedule(sizes, stretches, seed, shuffle, keeps_rows)
        epoch_tokens: tuple[int | None, ...] = (None,) * len(sources)
        if not planned:
            _check_epoch(sources, ordered)
            epoch_tokens = _epoch_tokens(sources, ordered, batching, num_streams)
        if (windows := ordered.num_windows) < num_streams:
            raise ConfigError(
                f"`num_streams`={num_streams}, but an epoch has only {windows} windows. Lower "
                "`num_streams` or `window_tokens`."
            )
        plan = cls(
            tuple(by_data),
            weights,
            tuple(np.cumsum([source.rows for source in sources]).tolist()),
            epoch_tokens,
            split,
            batching,
            step_size,
            ordered,
            stream,
            num_streams,
            window_tokens or 0,
            exhausted,
            planned,
            given,
            None if skip is None else _ranges(skip, opened),
        )
        if keeps_rows:
            for policy in {batching, *(stage.batching for stage in plan.stages)}:
                policy.in_order(np.ones(1, np.int64), np.zeros(1, np.int64))  # or a ConfigError
        return plan

    @property
    def has_end(self) -> bool:
        """Whether an epoch ends, and at a known window."""
        return self.order.num_windows < ENDLESS

    def is_skipped(self, rows: np.ndarray) -> np.ndarray:
        """Return which rows no loss counts. `rows` are numbers over all sources, any shape."""
        starts = dict(zip(self.data, (0, *self.row_ends), strict=False))
        ranges = [
            np.reshape(np.array(given, np.int64), (-1, 2)) + starts[data]
            for data, given in (self.skip or {}).items()
            if data in starts
        ]
        joined = np.concatenate([np.empty((0, 2), np.int64), *ranges])
        joined = joined[np.argsort(joined[:, 0], kind="stable")]
        before = np.searchsorted(joined[:, 0], rows, side="right")  # ranges that begin until a row
        ends = np.append(0, np.maximum.accumulate(joined[:, 1]))
        found: np.ndarray = rows < ends[before]
        return found

    def with_part(self, tokens: int) -> Self:
        """Return the plan of about `tokens` random tokens of the only source."""
        return replace(self, part=tokens, epoch_tokens=(None,))

    def part_of(self, window: int) -> int | None:
        """Return the tokens to deliver of a window; None: all."""
        if self.part is None:
            return None
        size = self.order.stretches[0].window_tokens
        left = self.part - window * size
        return None if left >= size else int(left)

    def earlier_in(self, epoch: int, window: int) -> tuple[Earlier, ...]:
        """Return how the beginning of a window of this stream was read; see `earlier`."""
        place, found = self.earlier
        return found if place == (epoch, window) else ()

    def stage_of(self, window: int) -> PlannedStage | None:
        """Return the stage of a window; None if the plan has no stages."""
        return self.stages[self.order.stretch_of(window)] if self.stages else None

    def batching_of(self, window: int) -> Batching:
        """Return the policy of a window."""
        stage = self.stage_of(window)
        return stage.batching if stage else self.batching

    def reweighed(
        self,
        weights: Mapping[str, float],
        position: Position,
        opened: Mapping[str, OpenedSplit],
        ends: Collection[int | None],
    ) -> tuple[Self, int]:
        """Return the plan with other weights from the first window that has not begun, and the
        tokens of the run at its beginning.

        Args:
            weights: Weights by fingerprint.
            position: What was delivered.
            opened: The data sets by fingerprint.
            ends: Where the stages of the user's list end. At another end, an earlier change of
                weights waits for its window, and is replaced.

        Raises:
            ConfigError: The weights cannot change there.
        """
        if self.num_streams > 1:
            raise ConfigError(
                f"`reweigh` with `num_streams`={self.num_streams}: streams are at different "
                "windows, so their list cannot change. Use `num_streams`=1."
            )
        if position.epoch:
            raise ConfigError(
                "`reweigh`: the list of stages was read to its end, and only its future may "
                "change. Resume with a longer list."
            )
        history = self._history(self.stages, self.data, position)
        number = self.order.stretch_of(position.window)
        now, later = self.stages[number], self.stages[number + 1 :]
        if history.stop == now.until and later and now.until not in ends:
            now, later = later[0], later[1:]
        if history.stop == now.until:
            raise ConfigError(
                f"`reweigh`: the present stage ends at token {now.until:,}, and its last window "
                "has begun, so nothing of it is left to change. Call `reweigh` after that, or edit "
                "the list and resume."
            )
        tokens = self.window_tokens
        new = replace(now, begins=history.stop, weights=weights, window_tokens=tokens)
        new = _with_window(new, opened, self.micro_batches_per_step)
        _check_fit(tuple(opened[data] for data in weights), new.batching)
        return self._after(history, (new, *later)), history.stop

    def resumed(
        self, saved: PlanSettings, position: Position, names: Mapping[str, str]
    ) -> tuple[Self, Position]:
        """Return the plan of a resumed run: a saved plan as far as it was read, then this plan.

        Args:
            saved: Settings of the saved plan.
            position: Position of the saved run.
            names: Names of the data sets by fingerprint, for messages.

        Returns:
            The plan, and the position in it.

        Raises:
            ResumeError: The lists of stages differ before the position.
        """
        theirs = filled_as(planned_stages(saved.stages or [], saved.data), self.stages)
        if saved.given == self.given:  # the saved list is this one, and what became of it
            if missing := [data for data in data_of(theirs) if data not in self.data]:
                raise ResumeError(
                    f"cannot resume: the run has a data set with fingerprint {missing[0]}, which "
                    "is in no stage of this list. Add the data set to the list."
                )
            return self._after(History(tuple(saved.data), ()), theirs), position
        if position == (1, 0, 0):  # the saved list was read to its end, and may go on now
            position = Position(0, sum(stage.num_windows for stage in theirs), 0)
        if self.num_streams > 1 or position.epoch:
            raise ResumeError(
                "cannot resume: the list of stages has changed. It may change in its first epoch "
                "only, and not with `num_streams`. Use the same list."
            )
        history = self._history(theirs, saved.data, position)
        history.check(self.stages, names, self._sizes)
        try:
            plan = self._after(history, self.stages)
        except ConfigError as error:
            raise ResumeError(f"cannot resume: {error}") from error
        if position.window == plan.num_windows:
            position = Position(1, 0, 0)
        return plan, position

    @staticmethod
    def _history(
        stages: Sequence[PlannedStage], data: Sequence[str], position: Position
    ) -> History:
        return History.of(stages, data, position.window + (position.micro_batch > 0))

    def _after(self, history: History, future: Sequence[PlannedStage]) -> Self:
        """Return this plan with a history, and then other stages of its data sets.

        Sources are numbered as a run meets them. So a source keeps its number, and with it its
        order, when later stages change.

        Raises:
            ConfigError: A stage is too short.
        """
        order, stages, sizes = self.order, history.then(future), self._sizes
        for stage in stages:
            _check_length(stage, sizes)
        # a later edit may use the rest
        data = tuple(dict.fromkeys((*history.data, *data_of(stages), *self.data)))
        numbers = {each: number for number, each in enumerate(data)}
        stages = tuple(stage.numbered(data) for stage in stages)
        sources = tuple(sizes[each] for each in data)
        rows = np.diff(self.row_ends, prepend=0)[[self.data.index(each) for each in data]]
        return replace(
            self,
            data=data,
            row_ends=tuple(np.cumsum(rows).tolist()),
            stages=stages,
            order=replace(
                order,
                sources=sources,
                stretches=tuple(stage.stretch(sources, numbers) for stage in stages),
            ),
        )

    @property
    def _sizes(self) -> dict[str, Source]:
        return dict(zip(self.data, self.order.sources, strict=True))

    def window_number(self, nth: int) -> int:
        """Return the number in the epoch of the nth window of this stream."""
        return self.stream + nth * self.num_streams

    def without_steps(self, where: str) -> ConfigError:
        """Return the error for a window or an epoch that has too few rows for any step."""
        return ConfigError(
            f"`last`='drop' leaves out all rows of {where}, because no window has enough rows for "
            f"one step (`micro_batches_per_step`={self.micro_batches_per_step}). Use "
            "`last`='short', smaller batches or fewer micro-batches."
        )

    @property
    def num_windows(self) -> int:
        """Number of windows of this stream in an epoch."""
        count = self.order.num_windows
        if self.part is not None:
            count = min(count, math.ceil(self.part / self.order.stretches[0].window_tokens))
        return len(range(self.stream, count, self.num_streams))

    def next_window(self, position: Position) -> Position:
        """Return the position of the beginning of the next window."""
        if position.window + 1 < self.num_windows:
            return Position(position.epoch, position.window + 1, 0)
        return Position(position.epoch + 1, 0, 0)

    def settings(self) -> PlanSettings:
        """Return the settings that define the plan, for a saved state."""
        order = self.order
        settings = PlanSettings(
            list(self.data),
            saved_policy(self.batching),
            self.micro_batches_per_step,
            self.split,
            order.seed,
            self.stream,
            self.num_streams,
            order.shuffle,
            order="file" if order.keeps_rows else None,
            skip=dict(self.skip or {}) or None,
        )
        if self.stages:
            stages = saved_stages(self.stages)
            return msgspec.structs.replace(settings, stages=stages, given=self.given)
        return msgspec.structs.replace(
            settings,
            weights=list(self.weights),
            batches=list(order.batches_read),
            windows=order.num_windows,
            window_tokens=self.window_tokens,
            exhausted=self.exhausted,
        )


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a plan reads after the current window, for prefetching."""

    plan: Plan
    position: Position

    def windows(self) -> Iterator[Position]:
        """Yield the positions of the windows after the current one, forever."""
        at = self.position
        while True:
            at = self.plan.next_window(at)
            yield at

    def batches(self, position: Position) -> np.ndarray:
        """Return the record batches of a window, counted over all sources, shape (K,), int64."""
        number = self.plan.window_number(position.window)
        return self.plan.order.window(position.epoch, number)


def default_window_tokens(
    sources: Sequence[OpenedSplit],
    weights: Sequence[float],
    batching: Batching,
    step_size: int,
    *,
    is_staged: bool = False,
) -> int:
    """Return the default tokens of a window.

    A window has 256 steps, so that rows in a step have similar lengths. For a mixture it has at
    least 5 record batches of every source, so that each source has about the same share in every
    window. And it is small enough that a worker can hold several windows and the first is ready
    after about 100 ms.
    """
    rows = sum(source.rows for source in sources)
    mean_tokens = sum(source.tokens for source in sources) / rows
    shares = proportions(weights)
    tokens = batching.tokens_per_batch(mean_tokens)
    wanted = min(_WINDOW_STEPS * step_size * tokens, _MOST_WINDOW_TOKENS)
    of_sources = max(
        math.ceil(_WINDOW_BATCHES * source.tokens / source.batches / share)
        for source, share in zip(sources, shares, strict=True)
    )
    of_sources, least = min(of_sources, _MOST_FOR_SOURCES), _LEAST_WINDOW_TOKENS
    if is_staged:
        parts = zip(sources, shares, strict=True)
        mean_tokens = 1 / float(sum(share * each.rows / each.tokens for each, share in parts))
        least, most = _LEAST_OF_STAGES, int(_MOST_ROWS_OF_STAGES * mean_tokens)
        wanted, of_sources = min(wanted, most), min(of_sources, most)
    return max(min(least, int(_WINDOW_ROWS * mean_tokens)), wanted, of_sources)


def _refuse_equal(sources: Iterable[OpenedSplit]) -> dict[str, OpenedSplit]:
    """Return sources by fingerprint. Plans and states identify a source by its fingerprint.

    Raises:
        ConfigError: Two have the same content.
    """
    found: dict[str, OpenedSplit] = {}
    for source in sources:
        if (other := found.setdefault(source.manifest.fingerprint, source)) is not source:
            raise ConfigError(
                f"{other.name} and {source.name} have the same content: use one of them, with the "
                "sum of their weights if they have some."
            )
    return found


def _planned(
    stages: Sequence[Stage],
    opened: Mapping[object, OpenedSplit],
    batching: Batching,
    window_tokens: int | None,
    step_size: int,
) -> tuple[PlannedStage, ...]:
    """Return the stages with their places in the run. `opened` has the data set of each place."""
    by_data = {source.manifest.fingerprint: source for source in opened.values()}
    sizes = _sizes(by_data)
    planned: list[PlannedStage] = []
    begins = 0
    for number, stage in enumerate(stages, 1):
        if stage.until_tokens is None and number < len(stages):
            raise ConfigError(
                f"stage {number} has no end, so stage {number + 1} never begins. Set "
                "`until_tokens`."
            )
        if stage.until_tokens is not None and stage.until_tokens <= begins:
            raise ConfigError(
                f"stage {number} ends at token {stage.until_tokens:,}, but begins at {begins:,}. "
                "Raise `until_tokens`, which counts from the beginning of the run."
            )
        made = PlannedStage(
            begins,
            stage.until_tokens,
            window_tokens or 0,
            _by_data(stage.weights, opened),
            stage.batching or batching,
            None if stage.targets is None else str(stage.targets),
        )
        _check_policy(made.batching)
        if made.targets is not None:  # or a ConfigError
            TargetRule.from_setting(made.targets, next(iter(by_data.values())).manifest.columns)
        _check_fit(tuple(by_data[data] for data in made.weights), made.batching)
        planned.append(_with_window(made, by_data, step_size))
        _check_length(planned[-1], sizes)
        begins = made.until or ENDLESS
    return tuple(planned)


def _by_data(
    weights: Mapping[StorePath, float], opened: Mapping[object, OpenedSplit]
) -> dict[str, float]:
    """Return the weights of a stage by fingerprint."""
    placed = by_place(weights)
    return {opened[place].manifest.fingerprint: weight for place, weight in placed.items()}


def _with_window(
    stage: PlannedStage, opened: Mapping[str, OpenedSplit], step_size: int
) -> PlannedStage:
    """Return the stage with the tokens of its windows: 0 means the default, and every window has
    record batches."""
    sources = [opened[data] for data in stage.weights]
    tokens = stage.window_tokens
    if not tokens:
        weights = list(stage.weights.values())
        tokens = default_window_tokens(sources, weights, stage.batching, step_size, is_staged=True)
    return replace(stage, window_tokens=max(tokens, stage.least_window(_sizes(opened))))


def _sizes(opened: Mapping[str, OpenedSplit]) -> dict[str, Source]:
    """Return the size of each data set."""
    return {data: Source(each.batches, each.tokens) for data, each in opened.items()}


def _check_length(stage: PlannedStage, sizes: Mapping[str, Source]) -> None:
    """Check that every window of a stage has record batches."""
    if stage.until is None:
        return
    least, length = stage.least_tokens(sizes), stage.until - stage.begins
    if length < least:
        raise ConfigError(
            f"the stage from token {stage.begins:,} to {stage.until:,} has too few tokens, "
            f"{length:,}. With these weights a record batch may need {least:,}. Raise "
            "`until_tokens`."
        )


def listed_ranges(skip: object) -> dict[StorePath, list[Any]]:
    """Return `skip` with lists, because a plan may be made several times.

    Raises:
        ConfigError: `skip` is not a dict from folders to several ranges.
    """
    if not isinstance(skip, Mapping) or not all(
        isinstance(ranges, Iterable) and not isinstance(ranges, str) for ranges in skip.values()
    ):
        raise checks.refusal("skip", skip, _SKIP)
    return {folder: list(ranges) for folder, ranges in skip.items()}


def _ranges(
    skip: Mapping[StorePath, Iterable[Any]], opened: Mapping[object, OpenedSplit]
) -> dict[str, list[tuple[int, int]]]:
    """Return the ranges of rows to skip, by the fingerprint of their data set.

    Args:
        skip: Ranges by folder or URL, as the user gave them.
        opened: The data sets of the loader, by place.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for folder, ranges in skip.items():
        source = opened.get(place_of(folder))
        if source is None:
            names = ", ".join(each.name for each in opened.values())
            raise ConfigError(
                f"`skip`: {folder} is no data set of this loader. Its data sets are {names}."
            )
        pairs = found.setdefault(source.manifest.fingerprint, [])
        for given in ranges:
            is_pair = isinstance(given, Sequence | np.ndarray) and np.shape(given) == (2,)
            edges = [checks.as_int(edge) for edge in given] if is_pair else []
            first, stop = edges if len(edges) == 2 else (None, None)
            if first is None or stop is None or not 0 <= first < stop <= source.rows:
                raise ConfigError(
                    f"`skip`: {given!r} of {source.name}: expected (first row, row after the "
                    f"last), of rows 0 to {source.rows - 1:,}."
                )
            pairs.append((first, stop))
    return found


def _epoch_tokens(
    sources: tuple[OpenedSplit, ...], order: Schedule, batching: Batching, num_streams: int
) -> tuple[int | None, ...]:
    """Return the tokens of each source in an epoch; None if the plan does not know them.

    The plan knows them if the source is read a whole number of times, in one stream, and no row is
    truncated, cropped or left out.
    """
    longest = max(source.split.longest_row for source in sources)
    truncates = batching.long_rows == "truncate" and longest > batching.longest_piece
    drops = batching.last == "drop"
    if num_streams > 1 or truncates or drops or batching.long_rows == "crop":
        return (None,) * len(sources)
    read = zip(order.batches_read, order.sources, strict=True)
    times = [divmod(batches, source.batches) for batches, source in read]
    return tuple(
        None if rest else source.tokens * whole
        for source, (whole, rest) in zip(sources, times, strict=True)
    )


def _check_epoch(sources: tuple[OpenedSplit, ...], order: Schedule) -> None:
    for source, batches in zip(sources, order.batches_read, strict=True):
        if not batches:
            raise ConfigError(
                f"{source.name} is too small, or its weight too low: no record batch of it is "
                "read. Raise its weight, or choose `exhausted`='continue'."
            )


def _check_policy(batching: Batching) -> None:
    if type(batching) not in POLICIES:
        raise ConfigError(f"`batching`={batching!r}: expected {offered()}.")


def _check_columns(source: OpenedSplit) -> None:
    """Reject two columns of one role. All sources of a mixture have the same columns."""
    for role in ("target", "context"):
        named = [c.name for c in source.manifest.columns if role_of(c.name) == role]
        if len(named) > 1:
            raise ConfigError(
                f"{source.name}: has the {role}s {' and '.join(named)}, but a batch has one. "
                "Make a data set for each."
            )


def _check_fit(sources: tuple[OpenedSplit, ...], batching: Batching) -> None:
    longest = max(source.split.longest_row for source in sources)
    if batching.long_rows == "refuse" and longest > batching.longest_piece:
        raise ConfigError(
            f"the longest row has {longest:,} tokens, but {batching} allows at most "
            f"{batching.longest_piece:,}. Raise the limit, or cut long rows (`long_rows`='cut')."
        )
    manifest = sources[0].manifest
    begin, size = batching.begin_token, manifest.tokenizer.vocabulary_size
    if begin is not None and begin >= size:
        raise ConfigError(f"`begin_token`={begin}: the vocabulary has only {size:,} ids.")
    if not any(c.per == "row" and role_of(c.name) == "target" for c in manifest.columns):
        return
    if batching.packs:
        unpacked = (policy for policy in POLICIES if not policy.packs)
        raise ConfigError(
            f"rows with one label each cannot be packed: use {offered(unpacked)} for the task "
            f"`{manifest.task}`."
        )
    if longest > batching.longest_piece:
        raise ConfigError(
            f"the longest row has {longest:,} tokens, but {batching} allows at most "
            f"{batching.longest_piece:,}, and a row with one label cannot be cut. Raise the limit."
        )
