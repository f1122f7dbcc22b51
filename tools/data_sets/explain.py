"""`shards explain OUT`: list the records of a training step, from a saved state.

The state is a JSON file, or part of a checkpoint of `train`. It has the position of the run and the
settings of the plan, so any step near it can be made again. This reads the window of the step, and
the windows between the step and the state.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import msgspec
import numpy as np

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.data_set import OpenedSplit, open_splits
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.pipeline.planning.plan import Plan, PlanSettings, Position
from tokenfeed.pipeline.planning.policies import policy_of
from tokenfeed.pipeline.planning.stages import Stage
from tokenfeed.pipeline.planning.state import Delivered, SavedState, own_stream
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.origins import Origin, origins_of
from tokenfeed.pipeline.windows.rank_slice import between
from tokenfeed.pipeline.windows.reader import WindowReader
from tokenfeed.tools.shell.command_line import WholeNumber, text
from tokenfeed.tools.shell.console import print_json
from tokenfeed.trainer.config.values import NotNegative, Positive

_CHECKPOINT_FILE = "checkpoint.json"


@dataclass(frozen=True, slots=True)
class StateFile:
    """A loader state, and the step of the run after which it was saved; 0 if unknown."""

    state: dict[str, Any]
    step: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a state or a checkpoint.

        Raises:
            ConfigError: The file is neither.
        """
        path = path / _CHECKPOINT_FILE if path.is_dir() else path
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"invalid JSON ({error})"
            raise ConfigError(
                f"`--state` {path}: {reason}. Give what `state_dict()` returned, saved by "
                "`json.dump`, or a checkpoint of `train`."
            ) from None
        meta = content.get("meta", content) if isinstance(content, dict) else {}
        if not isinstance(meta, dict) or not isinstance(meta.get("loader"), dict):
            return cls(content, 0)
        step = checks.as_int(meta.get("step"))
        if step is None:
            raise ConfigError(
                f"`--state` {path}: the checkpoint has no step (step={meta.get('step')!r}). Give "
                "an unchanged checkpoint of `train`."
            )
        return cls(meta["loader"], step)

    @property
    def num_streams(self) -> int:
        """Number of streams in a merged state; else 1."""
        streams = self.state.get("streams") if isinstance(self.state, dict) else None
        return len(streams) if streams and isinstance(streams, list) else 1


_MOST_STEPS = 1_000_000
"""Largest distance between a state and a step. The windows between them are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explain:
    """List the files, records and tokens of a training step."""

    out: tuple[Annotated[str, text("OUT...")], ...]
    """The data sets of the run: output folders of `pretokenize`, or their addresses. Give the data
    sets of a mixture in the order of the mixture."""
    state: Annotated[Path, msgspec.Meta(title="FILE", description="a path")] | None = None
    """The result of `state_dict()` as JSON, or a checkpoint of `train`."""
    step: WholeNumber | None = None
    """Number of the step. If --state is a checkpoint, steps are counted from the start of the run.
    If --state is a loader state, step 0 is the last one before the save, and step 1 the first one
    after the save. Default: the first step after the save."""
    rank: NotNegative | None = None
    """Show only the micro-batches of this rank, out of --world-size ranks. Default: all of the
    step."""
    world_size: Positive = 1
    """Number of ranks that shared each step."""
    json: bool = False
    """Print a JSON object per micro-batch."""

    def run(self) -> int:
        """Print the micro-batches of the step."""
        if self.state is None:
            raise ConfigError(
                "`--state` is needed: expected a checkpoint of `train`, or a file with what "
                "`state_dict()` returned, as JSON."
            )
        saved = StateFile.read(self.state)
        per_stream, others = divmod(self.world_size, saved.num_streams)
        if others or (self.rank or 0) >= self.world_size:
            raise ConfigError(
                f"`--rank` {self.rank} and `--world-size` {self.world_size}: expected a rank from "
                f"0 up to the number of ranks, which {saved.num_streams} streams share evenly."
            )
        stream, rank = divmod(self.rank or 0, per_stream)
        number = saved.step + 1 if self.step is None else self.step
        if abs(number - saved.step) > _MOST_STEPS:
            raise ConfigError(
                f"`--step` {number}: is {abs(number - saved.step):,} steps from the state, and all "
                "of them would be read. Give a state that was saved nearer to the step."
            )
        state = own_stream(saved.state, stream)
        settings = SavedState.checked(state).plan
        sources = _sources(self.out, settings)
        delivered = Delivered.from_state(_plan(sources, settings), state)
        plan, position = delivered.plan, delivered.position
        reader = WindowReader(sources)
        dealt = WindowMaker(plan, reader, 0, per_stream)
        step = _find(dealt, position, number - saved.step - 1, number)
        one_rank = (0, 1) if self.rank is None else (rank, per_stream)
        maker = WindowMaker(plan, reader, *one_rank)
        for micro_batch in _micro_batches(maker, sources, step):
            self._say(number, micro_batch)
        return 0

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
            print(
                f"{piece.file} record {piece.record}, tokens {piece.start} to {piece.stop} "
                f"(row {piece.row} of {piece.data_set})"
            )


class _MicroBatch(NamedTuple):
    epoch: int
    window: int
    micro_batch: int
    """Its number in the window."""
    filler: bool
    pieces: list[Origin]


class _Step(NamedTuple):
    """The micro-batches of a step: numbers `first` to `stop` of a window."""

    dealt_from: Position
    """The position from which the window was dealt to ranks."""
    first: int
    stop: int


def _sources(paths: tuple[str, ...], settings: PlanSettings) -> tuple[OpenedSplit, ...]:
    """Open the data sets, and check that they are the ones of the state."""
    sources = open_splits(paths, settings.split)
    ours = tuple(source.manifest.fingerprint for source in sources)
    if settings.stages is not None and set(ours) == set(settings.data):
        return tuple(sources[ours.index(data)] for data in settings.data)
    if list(ours) != settings.data:
        raise ResumeError(
            f"the state belongs to data sets with the fingerprints {', '.join(settings.data)}; "
            f"these have {', '.join(ours)}. Give the same data sets, in the same order."
        )
    return sources


def _plan(sources: tuple[OpenedSplit, ...], settings: PlanSettings) -> Plan:
    """Make the plan of a state again. Of stages, it has the data sets only."""
    stores: list[StorePath] = [source.store for source in sources]
    data: Mixture | list[Stage]
    if settings.stages is None:
        weights = settings.weights or []
        if len(weights) != len(stores):
            raise ResumeError(
                f"the state has {len(weights)} weights for {len(stores)} data sets. Give an "
                "unchanged state."
            )
        data = Mixture(dict(zip(stores, weights, strict=True)), settings.exhausted or "repeat")
    else:
        data = [Stage(dict.fromkeys(stores, 1.0))]
    made = Plan.from_splits(
        sources,
        data,
        policy_of(settings.batching),
        split=settings.split,
        micro_batches_per_step=settings.micro_batches_per_step,
        window_tokens=settings.window_tokens,
        seed=settings.seed,
        shuffle=settings.shuffle,
        order=settings.order or "shuffled",
        stream=settings.stream,
        num_streams=settings.num_streams,
    )
    return replace(made, given=settings.given)  # so that `from_state` takes the stages of the state


def _find(maker: WindowMaker, position: Position, steps_on: int, number: int) -> _Step:
    """Return the step that comes `steps_on` steps after the next one at a position."""
    begin = position if steps_on >= 0 else position._replace(micro_batch=0)
    ends = _step_ends(maker, begin)
    index = int(np.searchsorted(ends, position.micro_batch, side="right")) + steps_on
    without = 0  # windows in a row that have no step
    while index >= len(ends):
        without = 0 if len(ends) else without + 1
        if without > maker.plan.num_windows:
            raise maker.plan.without_steps(f"epoch {begin.epoch}")
        index -= len(ends)
        begin = maker.plan.next_window(begin)
        ends = _step_ends(maker, begin)
    while index < 0:
        windows = begin.epoch * maker.plan.num_windows + begin.window - 1
        if windows < 0:
            raise ConfigError(f"`--step` {number}: is before the first step of the run.")
        begin = Position(*divmod(windows, maker.plan.num_windows), 0)
        ends = _step_ends(maker, begin)
        index += len(ends)
    first = int(ends[index - 1]) if index else begin.micro_batch
    return _Step(begin, first, int(ends[index]))


def _step_ends(maker: WindowMaker, begin: Position) -> np.ndarray:
    """Return the number of micro-batches up to the end of each step of a window, which is dealt to
    ranks from a position. With more ranks than micro-batches in a step, several steps end at once
    and count as one."""
    made = maker.make(begin)
    ends: np.ndarray = made.positions[made.steps > 0]
    return ends


def _micro_batches(
    maker: WindowMaker, sources: tuple[OpenedSplit, ...], step: _Step
) -> Iterator[_MicroBatch]:
    """Yield the micro-batches of a step that one rank got."""
    (epoch, window, first), made = step.dealt_from, maker.make(step.dealt_from)
    begins = [first, *made.positions[:-1].tolist()]
    for number, begin in enumerate(begins):
        is_filler, pieces = bool(made.is_filler[number]), between(made.piece_offsets, number)
        place = begin if is_filler else begin + maker.rank
        if step.first <= place < step.stop:
            rows, lengths = made.rows[pieces], made.piece_lengths[pieces]
            starts = np.zeros(len(rows), np.int64) if made.starts is None else made.starts[pieces]
            origins = origins_of(sources, rows, starts, lengths)
            yield _MicroBatch(epoch, window, place, is_filler, origins)
