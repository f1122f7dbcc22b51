"""Stages: parts of a run with their own weights. Stages that a run has not read may still change.

    [Stage({"prose/": 0.8, "code/": 0.2}, until_tokens=10_000_000_000),
     Stage({"prose/": 0.5, "math/": 0.5})]

A stage decides only how fast each source advances, so a source goes on where the stage before left
it; see `schedule`. The progress of a run is counted in tokens: every record batch counts as many as
the source has on average. Windows lie between multiples of `window_tokens` from the beginning of
their stage; the last window of a stage ends with the stage, and has between half and one and a half
times as many.

A run has a past and a future. The past is a `History`: the stages as they were read, up to the end
of the window under way. It only grows. The future is the rest of the user's list. Resuming with an
edited list and `reweigh` are the same: the same history, then another list. Torch-free, no I/O.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from os import PathLike
from os.path import realpath
from typing import Annotated, Any, Self, TypeVar

import msgspec
import xxhash

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.manifest import canonical
from tokenfeed.pipeline.format.store import Store, StorePath
from tokenfeed.pipeline.planning.mixture import Mixture, are_folders, checked_weights, proportions
from tokenfeed.pipeline.planning.policies import Batching, policy_of, saved_policy
from tokenfeed.pipeline.planning.schedule import (
    ENDLESS,
    Source,
    Stretch,
    integers,
    least_tokens,
)

_Given = TypeVar("_Given")


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


_Weight = Annotated[float, msgspec.Meta(gt=0)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 61)]


class SavedStage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stage in a saved state."""

    window_tokens: _Tokens
    weights: Annotated[dict[str, _Weight], msgspec.Meta(min_length=1)]
    """Weight of each data set, by fingerprint."""
    until: _Tokens | None = None
    batching: dict[str, Any] | None = None
    """See `saved_policy`. None: as in the stage before."""
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

    def numbered(self, data: Iterable[str]) -> Self:
        """Return the stage with its data sets in this order."""
        return replace(self, weights={of: self.weights[of] for of in data if of in self.weights})

    def stretch(self, sources: Sequence[Source], numbers: Mapping[str, int]) -> Stretch:
        """Return the stage for a schedule. `numbers` has the number of each data set."""
        weights = {numbers[data]: weight for data, weight in self._exact.items()}
        tokens = self.edge(self.num_windows) - self.begins
        return Stretch.of_stage(sources, weights, self.window_tokens, self.num_windows, tokens)

    def least_tokens(self, sizes: Mapping[str, Source]) -> int:
        """Return a number of tokens in which at least one data set gives a record batch. `sizes`
        has the size of each data set."""
        whole = integers(dict(enumerate(self._exact.values())))
        return least_tokens([sizes[data] for data in self.weights], whole, whole)

    def least_window(self, sizes: Mapping[str, Source]) -> int:
        """Return the least `window_tokens` of the stage: every window has record batches."""
        return 2 * self.least_tokens(sizes)

    @property
    def _exact(self) -> dict[str, Fraction]:
        shares = proportions(self.weights.values())
        return dict(zip(self.weights, shares, strict=True))


def saved_stages(stages: Sequence[PlannedStage]) -> list[SavedStage]:
    """Return stages for a saved state."""
    policies = [None, *(stage.batching for stage in stages)]
    return [
        SavedStage(
            stage.window_tokens,
            dict(stage.weights),
            stage.until,
            None if stage.batching == before else saved_policy(stage.batching),
            stage.targets,
        )
        for stage, before in zip(stages, policies, strict=False)
    ]


def planned_stages(saved: Sequence[SavedStage], data: Sequence[str]) -> tuple[PlannedStage, ...]:
    """Return the stages of a saved plan of some data sets: the inverse of `saved_stages`.

    Raises:
        ResumeError: The list is damaged.
    """
    stages: list[PlannedStage] = []
    begins, batching = 0, None
    for number, each in enumerate(saved, 1):
        is_after = (each.until or ENDLESS) > begins
        has_end = each.until or number == len(saved)
        if not (each.weights.keys() <= set(data) and is_after and has_end):
            raise ResumeError(
                f"cannot resume: stage {number} of the state is damaged. Use an unchanged state."
            )
        batching = each.batching or batching
        weights = {of: each.weights[of] for of in data if of in each.weights}
        policy = policy_of(batching)
        stages.append(
            PlannedStage(begins, each.until, each.window_tokens, weights, policy, each.targets)
        )
        begins = each.until or ENDLESS
    return tuple(stages)


def filled_as(stages: Iterable[PlannedStage], ours: Sequence[PlannedStage]) -> list[PlannedStage]:
    """Return stages of a state that fill micro-batches as a list does at the same tokens of the
    run, because a state does not say so; see `saved_policy`."""
    found = []
    for stage in stages:
        mine = _stage_at(ours, stage.begins)
        same = mine is not None and mine.batching == stage.batching
        found.append(replace(stage, batching=mine.batching) if mine and same else stage)
    return found


def data_of(stages: Iterable[PlannedStage]) -> tuple[str, ...]:
    """Return the fingerprints of all data sets, in the order in which a run meets them."""
    return tuple(dict.fromkeys(data for stage in stages for data in stage.weights))


def digest_of(stages: Sequence[PlannedStage]) -> str:
    """Return a short name of a list, to recognise the same list again."""
    saved = msgspec.to_builtins(saved_stages(stages))
    return xxhash.xxh3_64_hexdigest(canonical({"stages": saved}))


@dataclass(frozen=True, slots=True)
class History:
    """What a run has begun to read: its stages, of which the last one ends with the window under
    way."""

    data: tuple[str, ...]
    """The data sets of the stages, in the order in which the run met them."""
    stages: tuple[PlannedStage, ...]

    @classmethod
    def of(cls, stages: Iterable[PlannedStage], data: Iterable[str], windows: int) -> Self:
        """Return the first windows of a list. `data`: its data sets, in the order of the plan."""
        past: list[PlannedStage] = []
        for stage in stages:
            if windows <= 0:
                break
            past.append(replace(stage, until=stage.edge(windows)))
            windows -= stage.num_windows
        met = data_of(past)
        return cls(tuple(each for each in data if each in met), tuple(past))

    @property
    def stop(self) -> int:
        """Tokens of the run at the end of the window under way."""
        return self.stages[-1].until or 0 if self.stages else 0

    def then(self, future: Sequence[PlannedStage]) -> tuple[PlannedStage, ...]:
        """Return the stages of a run that has this history, and then what a list says from its end
        on."""
        rest = [stage for stage in future if stage.until is None or stage.until > self.stop]
        if not (self.stages and rest and rest[0].begins < self.stop):
            return (*self.stages, *rest)
        *before, last = self.stages
        if rest[0].begins == last.begins and rest[0].edge(last.num_windows) == self.stop:
            return (*before, *rest)  # the same windows so far: at most the end has moved
        return (*self.stages, replace(rest[0], begins=self.stop), *rest[1:])

    def check(
        self,
        ours: Sequence[PlannedStage],
        names: Mapping[str, str],
        sizes: Mapping[str, Source],
    ) -> None:
        """Check that a list says the same as the history.

        They are compared between the ends of their stages, because one may have cut a stage of the
        other in two.

        Args:
            ours: The list.
            names: Names of the data sets by fingerprint, for messages.
            sizes: Sizes of the data sets of the list by fingerprint, for messages.

        Raises:
            ResumeError: They differ. The message names the first difference.
        """
        both = (*ours, *self.stages)
        edges = {edge for stage in both for edge in (stage.begins, stage.until or ENDLESS)}
        for begins in sorted(edge for edge in edges if edge < self.stop):
            mine, theirs = _stage_at(ours, begins), _stage_at(self.stages, begins)
            if mine is None or theirs is None:
                raise ResumeError(
                    f"cannot resume: this list of stages ends at token {ours[-1].until:,}, but the "
                    f"current window of the run ends at token {self.stop:,}. Lengthen the list."
                )
            our, their = _facts(mine, names), _facts(theirs, names)
            for what in {**their, **our}:
                if our.get(what, 0) != their.get(what, 0):
                    raise ResumeError(
                        f"cannot resume: from token {begins:,} on, {what} is "
                        f"{our.get(what, 'none')} in this list of stages, but was "
                        f"{their.get(what, 'none')} in the run. Its current window ends at "
                        f"token {self.stop:,}: change only what comes after that. A smaller "
                        "`window_tokens` from the start of a run allows earlier changes."
                    )
            if mine.window_tokens != theirs.window_tokens:
                raise ResumeError(
                    f"cannot resume: the run has windows of {theirs.window_tokens:,} tokens, but "
                    f"this loader has {mine.window_tokens:,}. {self._same_windows(sizes)}"
                )

    def _same_windows(self, sizes: Mapping[str, Source]) -> str:
        """Return how to make the windows of this history again. A run has one `window_tokens`, but
        stages need larger windows than that, or have defaults of their own."""
        known = [stage for stage in self.stages if stage.weights.keys() <= sizes.keys()]
        given = min(stage.window_tokens for stage in known)
        if all(max(given, each.least_window(sizes)) == each.window_tokens for each in known):
            return f"Pass `window_tokens`={given}."
        return "Leave out `window_tokens`, as the run did."


def _stage_at(stages: Sequence[PlannedStage], token: int) -> PlannedStage | None:
    return next((stage for stage in stages if stage.until is None or stage.until > token), None)


def _facts(stage: PlannedStage, names: Mapping[str, str]) -> dict[str, object]:
    """Return what the order of a stage depends on, by its name in messages. A missing share
    is 0."""
    shares = zip(stage.weights, proportions(stage.weights.values()), strict=True)
    facts: dict[str, object] = {
        f"the share of {names.get(data, data)}": share for data, share in shares
    }
    return facts | {"`batching`": stage.batching}
