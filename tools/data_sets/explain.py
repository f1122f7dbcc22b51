"""`shards explain OUT`: list the records of a step of a run, from a saved state.

The state is a file of its own, or in a checkpoint of `train`. It says where a run stood, and it
holds the settings of the plan, so any step near it can be made again. That reads the window of the
step, and the windows between it and the state.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import msgspec
import numpy as np

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.data_set import OpenedSplit, open_splits
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.pipeline.planning.mixture import Exhausted, Mixture
from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.planning.policies import policy_of
from tokenfeed.pipeline.planning.state import (
    Delivered,
    first_difference,
    own_stream,
    plan_settings_of,
)
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.origins import Origin, origins_of
from tokenfeed.pipeline.windows.reader import WindowReader
from tokenfeed.tools.shell.command_line import WholeNumber, text
from tokenfeed.tools.shell.console import print_json
from tokenfeed.trainer.config.values import NotNegative, Positive

__all__ = ["Explain", "SavedState"]

_CHECKPOINT_FILE = "checkpoint.json"


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state, and after which step of a run it was saved; 0 where it does not say."""

    state: dict[str, Any]
    step: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a state or a checkpoint.

        Raises:
            ConfigError: It is neither.
        """
        path = path / _CHECKPOINT_FILE if path.is_dir() else path
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"`--state` {path}: {error.strerror}. Give a file that there is, or a checkpoint."
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"`--state` {path}: is no JSON ({error}). Give what `state_dict()` gave, saved by "
                "`json.dump`, or a checkpoint of `train`."
            ) from None
        meta = content.get("meta", content) if isinstance(content, dict) else {}
        if not isinstance(meta, dict) or not isinstance(meta.get("loader"), dict):
            return cls(content, 0)
        return cls(meta["loader"], _step_of(meta, path))

    @property
    def num_streams(self) -> int:
        """Streams that the state is of, if it is one of several."""
        streams = self.state.get("streams") if isinstance(self.state, dict) else None
        return len(streams) if streams and isinstance(streams, list) else 1


def _step_of(meta: dict[str, Any], path: Path) -> int:
    """After which step of its run a checkpoint was saved.

    Raises:
        ConfigError: It does not say.
    """
    step = checks.as_int(meta.get("step"))
    if step is None:
        raise ConfigError(
            f"`--state` {path}: a checkpoint that says no step (step={meta.get('step')!r}). Give "
            "one as `train` left it."
        )
    return step


MOST_WINDOWS = 100_000
"""Between a state and a step: some hours of large windows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explain:
    """Name the files, records and tokens that a step of a run was made of."""

    out: tuple[Annotated[str, text("OUT...")], ...]
    """Output folders of `pretokenize`, or addresses: of a mixture all, in its order."""
    state: Annotated[Path, msgspec.Meta(title="FILE", description="a path")] | None = None
    """What `state_dict()` gave, as JSON, or a checkpoint of `train`."""
    step: WholeNumber | None = None
    """Which step: of a checkpoint by its number in the run; of a state 1 is the next one, 0 the one
    before. By default the next one."""
    rank: NotNegative | None = None
    """Only what this rank got, of so many as `--world-size` says. By default all of the step."""
    world_size: Positive = 1
    """Ranks that shared each step."""
    json: bool = False
    """Print a JSON object per micro-batch."""

    def run(self) -> int:
        """Print the micro-batches of the step."""
        if self.state is None:
            raise ConfigError(
                "`--state` is needed: expected a checkpoint of `train`, or a file with what "
                "`state_dict()` returned, as JSON."
            )
        saved = SavedState.read(self.state)
        ranks = self._ranks(saved.num_streams)
        state = own_stream(saved.state, ranks.stream)
        plan_settings = plan_settings_of(state)
        settings = _Settings.read(plan_settings)
        sources = _sources(self.out, settings)
        plan = _plan(sources, settings, plan_settings)
        position = Delivered.from_state(plan, state).position
        number = saved.step + 1 if self.step is None else self.step
        reader = WindowReader(sources)
        dealt = WindowMaker(plan, reader, 0, self.world_size // saved.num_streams)
        step = _find(dealt, position, number - saved.step - 1, number)
        maker = WindowMaker(plan, reader, ranks.rank, ranks.world_size)
        for micro_batch in _micro_batches(maker, sources, step):
            self._say(number, micro_batch)
        return 0

    def _ranks(self, num_streams: int) -> "_Ranks":
        rank = 0 if self.rank is None else self.rank
        if not 0 <= rank < self.world_size or self.world_size % num_streams:
            raise ConfigError(
                f"`--rank` {rank} and `--world-size` {self.world_size}: expected a rank from 0 up "
                f"to the number of ranks, which {num_streams} streams share evenly."
            )
        count = self.world_size // num_streams
        if self.rank is None:
            return _Ranks(0, 0, 1)
        return _Ranks(rank // count, rank % count, count)

    def _say(self, number: int, micro_batch: "_MicroBatch") -> None:
        if self.json:
            pieces = [piece._asdict() for piece in micro_batch.pieces]
            print_json({"step": number, **micro_batch._asdict(), "pieces": pieces})
            return
        filler = ", a filler" if micro_batch.filler else ""
        print(
            f"--- step {number} | epoch {micro_batch.epoch}, window {micro_batch.window}, "
            f"micro-batch {micro_batch.micro_batch}{filler}"
        )
        for piece in micro_batch.pieces:
            print(f"{piece.file} record {piece.record}, tokens {piece.start} to {piece.stop}")


class _Ranks(NamedTuple):
    """Whose micro-batches: a rank among those of its stream."""

    stream: int
    rank: int
    world_size: int


class _MicroBatch(NamedTuple):
    epoch: int
    window: int
    micro_batch: int
    """Its place in the window."""
    filler: bool
    pieces: list[Origin]


class _Step(NamedTuple):
    """A step, as micro-batches of a window."""

    dealt_from: Position
    """Where ranks began to share the window."""
    first: int
    stop: int


class _Settings(msgspec.Struct, frozen=True):
    """What a state says of its plan."""

    data: tuple[str, ...]
    split: str
    weights: tuple[float, ...]
    phases: tuple[tuple[int, ...], ...]
    windows: Annotated[int, msgspec.Meta(ge=1)]
    batching: str
    micro_batches_per_step: int
    stream: Annotated[int, msgspec.Meta(ge=0)]
    num_streams: Annotated[int, msgspec.Meta(ge=1)]
    seed: int
    shuffle: bool
    window_tokens: Annotated[int, msgspec.Meta(ge=1)]
    exhausted: Exhausted

    def __post_init__(self) -> None:
        if {len(self.weights), *map(len, self.phases)} != {len(self.data)} or not self.phases:
            raise ValueError("not as many weights and phases as data sets")

    @classmethod
    def read(cls, saved: dict[str, Any]) -> "_Settings":
        """Check their types.

        Raises:
            ResumeError: They are no settings of a plan.
        """
        try:
            return msgspec.convert(saved, cls)
        except msgspec.ValidationError as error:
            raise ResumeError(f"this is not a loader state ({error}).") from error


def _sources(paths: tuple[str, ...], settings: _Settings) -> tuple[OpenedSplit, ...]:
    """The data sets, if they are those of the state."""
    sources = open_splits(paths, settings.split)
    ours = tuple(source.manifest.fingerprint for source in sources)
    if ours != settings.data:
        raise ResumeError(
            f"the state is of data sets of the fingerprints {', '.join(settings.data)}, those "
            f"given have {', '.join(ours)}. Give the same, in the same order."
        )
    return sources


def _plan(sources: tuple[OpenedSplit, ...], settings: _Settings, saved: dict[str, Any]) -> Plan:
    """The plan of a state, made again."""
    weights = zip((source.store for source in sources), settings.weights, strict=True)
    of_sources: dict[StorePath, float] = dict(weights)
    plan = Plan.from_splits(
        sources,
        Mixture(of_sources, settings.exhausted) if sources[1:] else None,
        policy_of(settings.batching),
        split=settings.split,
        micro_batches_per_step=settings.micro_batches_per_step,
        window_tokens=settings.window_tokens,
        seed=settings.seed,
        shuffle=settings.shuffle,
        stream=settings.stream,
        num_streams=settings.num_streams,
    )
    if difference := first_difference(plan.settings(), saved):
        name, ours, theirs = difference
        raise ResumeError(
            f"the state contradicts itself: its settings make a plan with {name}={ours!r}, and it "
            f"has {name}={theirs!r}. Give a state as it was saved."
        )
    return plan


def _find(maker: WindowMaker, position: Position, steps_on: int, number: int) -> _Step:
    """The step so many after the one that comes next at a position."""
    begin = position if steps_on >= 0 else position._replace(micro_batch=0)
    ends = _step_ends(maker, begin)
    index = int(np.searchsorted(ends, position.micro_batch, side="right")) + steps_on
    while index >= len(ends):
        index -= len(ends)
        begin = maker.plan.next_window(begin)
        ends = _step_ends(maker, begin)
        _check_distance(index, ends, number)
    while index < 0:
        windows = begin.epoch * maker.plan.num_windows + begin.window - 1
        if windows < 0:
            raise ConfigError(f"`--step` {number}: is before the first step of the run.")
        begin = Position(*divmod(windows, maker.plan.num_windows), 0)
        ends = _step_ends(maker, begin)
        index += len(ends)
        _check_distance(-index, ends, number)
    first = int(ends[index - 1]) if index else begin.micro_batch
    return _Step(begin, first, int(ends[index]))


def _check_distance(steps: int, ends: np.ndarray, number: int) -> None:
    """Refuse what would be read for days; how many steps a window has, only reading it tells.

    Raises:
        ConfigError: So many steps take too many windows, if all are like the one that ends so.
    """
    windows = steps // max(len(ends), 1)
    if windows > MOST_WINDOWS:
        raise ConfigError(
            f"`--step` {number}: is some {windows:,} windows from where the state was saved, and "
            "each of them would be read. Give a state that was saved nearer to it."
        )


def _step_ends(maker: WindowMaker, begin: Position) -> np.ndarray:
    """How many micro-batches of a window there are up to the end of each step of it, where ranks
    begin to share it at a position. With more ranks than a step has micro-batches, they take
    several at once, and these are one."""
    rounds = maker.make(begin).index.rounds
    ends: np.ndarray = rounds.position[rounds.ends_step]
    return ends


def _micro_batches(
    maker: WindowMaker, sources: tuple[OpenedSplit, ...], step: _Step
) -> Iterator[_MicroBatch]:
    """What one rank gets of a step."""
    (epoch, window, first), made = step.dealt_from, maker.make(step.dealt_from)
    begins = [first, *made.index.rounds.position.tolist()]
    for batch, begin in zip(made.batches(), begins, strict=False):
        place = begin if batch.is_filler else begin + maker.rank
        if step.first <= place < step.stop:
            starts = np.zeros(len(batch.rows), np.int64) if batch.starts is None else batch.starts
            pieces = origins_of(sources, batch.rows, starts, batch.piece_lengths)
            yield _MicroBatch(epoch, window, place, batch.is_filler, pieces)
