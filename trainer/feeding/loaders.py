"""The loaders of a run's splits and phases, and how their batches form optimizer steps.

A step has `accumulation` micro-batches over all ranks, and each rank gets its share. A step of the
run is a step of the loader. If a resumed run has a higher --step-tokens, it is several steps of the
loader. At the start of a phase, the loader of its data is opened, and its weights are trained.
"""

import itertools
import logging
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.feeding.stats import RemoteStats
from tokenfeed.pipeline.format.manifest import SplitInfo
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.pipeline.planning.stages import Stage
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.config.schedule import Phase, phase_at, phases_of
from tokenfeed.trainer.data.attention import has_varlen
from tokenfeed.trainer.data.datasets import shown, source_of, training_source
from tokenfeed.trainer.data.micro_batch import MicroBatch, Shaper
from tokenfeed.trainer.feeding.batch_policy import (
    Policy,
    is_packed,
    largest_shape,
    long_rows_of,
    make_policy,
    rows_of,
    shapes,
)
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.tasks.task import Task

__all__ = [
    "Curriculum",
    "SplitLoaders",
    "StepBatch",
    "check_rows",
    "is_apart",
    "step_feed",
]

_SPLITS = ("train", "validation", "test")
"""The splits that a run reads."""


class SplitLoaders:
    """Opens the splits of a run's data sets."""

    def __init__(
        self, config: TrainConfig, task: Task, device: torch.device, dtype: torch.dtype
    ) -> None:
        """
        Args:
            config: Settings of the batching.
            task: Its preferences apply where a setting is auto.
            device: The device that batches are moved to.
            dtype: The number format of attention.

        Raises:
            ConfigError: Settings contradict each other, or the task.
        """
        check_rows(config, task)
        self._config, self._device, self._manifest = config, device, task.manifest
        self._apart, self._causal = is_apart(config, task), task.causal
        self._varlen = has_varlen(device, dtype)
        self._training = self._policy(packed=is_packed(config, task.manifest))
        self._evaluation = self._policy(packed=task.packs)
        self.shape = self._shaper(self._training)
        """Makes micro-batches from the batches of `train_loader`."""
        self.shape_evaluation = self._shaper(self._evaluation)
        """Makes micro-batches from the batches of `evaluation_loader`."""

    def train_loader(self, phase: Phase, *, goes_on: bool) -> ShardLoader:
        """Return a loader of a phase's train split: shuffled, without end, its steps shared by
        ranks.

        If data occur again in a later phase, their order is another one.

        Args:
            phase: The phase with its data.
            goes_on: Whether the caller will load a saved state, which has its own steps.
        """
        config = self._config
        return self._open(
            "train",
            self._training,
            num_workers=self._num_workers(),
            epochs=None,
            step_size=None if goes_on else config.accumulation,
            source=training_source(phase.config),
            seed=config.seed + phase.changes,
        )

    def evaluation_loader(self, split: str, folder: str | None = None) -> ShardLoader:
        """Return a loader that reads a split once, of all data sets or of one.

        It is shuffled, always in the same way. Unshuffled, packing starts with the longest
        documents, and an evaluation of a part of the split would see no others.
        """
        return self._open(split, self._evaluation, num_workers=0, epochs=1, source=folder)

    def evaluation_batches(
        self, split: str, most: int | None, folder: str | None = None
    ) -> Generator[tuple[int, MicroBatch], None, None]:
        """Yield this rank's micro-batches of an evaluation, with numbers independent of the rank.

        At most `most` micro-batches count, over all ranks. If the last ones do not suffice for all
        ranks, the others get one without targets: all ranks must compute equally often.
        """
        with self.evaluation_loader(split, folder) as feed:
            batches = iter(feed)
            for first in itertools.count(0, feed.world_size):
                position = feed.position
                batch = next(batches, None) if most is None or first < most else None
                if batch is None:
                    return
                micro_batch = self.shape_evaluation(batch)
                if most is not None and first + feed.rank >= most:
                    micro_batch = micro_batch.without_targets()
                yield (position.window << 32) + position.micro_batch + feed.rank, micro_batch

    def micro_batches_of(self, tokens: int, split: SplitInfo) -> int:
        """Return how many micro-batches of an evaluation hold about `tokens` tokens; at least 1."""
        return max(1, tokens // self._evaluation.tokens_per_batch(split.tokens / split.rows))

    def blanks(self) -> list[MicroBatch]:
        """Return an empty micro-batch of every shape in training and evaluation with --compile.

        Once the model is compiled for them, no step compiles again.
        """
        found = self._blanks(self._training, self.shape)
        if self._evaluation != self._training:
            found += self._blanks(self._evaluation, self.shape_evaluation)
        return found

    def largest_blank(self) -> MicroBatch:
        """Return an empty micro-batch of the largest shape in training."""
        longest = self._manifest.split("train").longest_row
        return self._like(self._training, self.shape).blank_like(
            *largest_shape(self._training, longest)
        )

    def _blanks(self, policy: Policy, shape: Shaper) -> list[MicroBatch]:
        longest = max(split.longest_row for split in self._manifest.splits.values())
        like = self._like(policy, shape)
        return [like.blank_like(rows, length) for rows, length in shapes(policy, longest)]

    def _like(self, policy: Policy, shape: Shaper) -> MicroBatch:
        with self._open("train", policy, num_workers=0, epochs=1) as feed:
            return shape(next(iter(feed)))

    def _policy(self, *, packed: bool) -> Policy:
        return make_policy(
            self._config,
            packed=packed,
            on_gpu=self._device.type != "cpu",
            long_rows=long_rows_of(self._config, self._manifest),
        )

    def _shaper(self, policy: Policy) -> Shaper:
        filled = self._config.compile
        return Shaper(
            causal=self._causal,
            apart=self._apart,
            varlen=self._varlen,
            rows_of=partial(rows_of, policy) if filled else None,
        )

    def _open(
        self,
        split: str,
        policy: Policy,
        *,
        num_workers: int,
        epochs: int | None,
        step_size: int | None = 1,
        source: str | Mixture | list[Stage] | None = None,
        seed: int | None = None,
    ) -> ShardLoader:
        return ShardLoader(
            source or source_of(self._config.shards),
            batching=policy,
            split=split,
            device=self._device,
            num_workers=num_workers,
            seed=self._config.seed if seed is None else seed,
            epochs=epochs,
            micro_batches_per_step=step_size,
            cache_dir=self._config.cache_dir,
            cache_bytes=self._config.cache_bytes,
            targets=self._config.targets,
        )

    def _num_workers(self) -> int:
        """--num-workers, or 2 for a GPU, or 0 for the CPU, where workers would slow training
        down."""
        if self._config.num_workers is not None:
            return self._config.num_workers
        return 0 if self._device.type == "cpu" else 2


def check_rows(config: TrainConfig, task: Task) -> None:
    """Reject settings that separate a row from its label.

    Raises:
        ConfigError: Rows with labels would be packed, or cut into pieces.
    """
    if task.kind != "row":
        return
    if is_packed(config, task.manifest):
        raise ConfigError(
            f"`--batching`: rows with one label, as those of {task.name}, cannot be packed. Leave "
            "it out."
        )
    splits = task.manifest.splits
    longest = max(splits[name].longest_row for name in _SPLITS if name in splits)
    if longest > config.sequence_length:
        raise ConfigError(
            f"`--sequence-length`={config.sequence_length}: {shown(config.shards)} has rows of "
            f"{longest} tokens, and rows with one label cannot be cut. Raise it to {longest}."
        )


def is_apart(config: TrainConfig, task: Task) -> bool:
    """Return whether packed documents are separate.

    Raises:
        ConfigError: The task needs separate documents, and --attention is rows.
    """
    if config.attention == "auto":
        return task.apart
    if config.attention == "rows" and not task.causal:
        raise ConfigError(
            f"`--attention`: rows is for causal models, and {task.name} attends in both "
            "directions: documents would see each other. Leave it out."
        )
    return config.attention == "documents"


class StepBatch(NamedTuple):
    """A batch, and its place in the step."""

    batch: Batch
    part: int
    """The number of the micro-batch in its step, over all ranks, from 0."""
    ends_step: bool


def step_feed(loader: ShardLoader, accumulation: int) -> Iterator[StepBatch]:
    """Return the batches of a loader, from the start of a step on.

    Example: the run began with 4 micro-batches per step, and now has 8 on 2 ranks. Then two steps
        of the loader make one of the run, and rank 1 yields the parts 1, 3, 5 and 7 of each step.

    Raises:
        ConfigError: A step is not a whole number of the loader's steps, or has fewer micro-batches
            than there are ranks.
    """
    of_loader = loader.micro_batches_per_step
    if accumulation % of_loader:
        raise ConfigError(
            f"`--step-tokens`: makes steps of {accumulation} micro-batches, and the run was begun "
            f"with {of_loader}. Give a multiple, or start a new run in another --run-dir."
        )
    if loader.world_size > of_loader:
        raise ConfigError(
            f"`--micro-batch-tokens`: {loader.world_size} ranks share {of_loader} micro-batches of "
            "a step, so some would have none. Lower it, as auto does, or start "
            f"at most {of_loader} ranks."
        )
    return _step_batches(loader, accumulation // of_loader, of_loader)


def _step_batches(loader: ShardLoader, together: int, of_loader: int) -> Iterator[StepBatch]:
    batches = iter(loader)
    while True:
        for nth in range(together):
            part, ends = nth * of_loader + loader.rank, False
            while not ends:
                batch = next(batches)
                ends = batch.ends_step
                yield StepBatch(batch, part, ends and nth + 1 == together)
                part += loader.world_size


_log = logging.getLogger(__name__)


class Curriculum:
    """Leads the training through the phases of a run."""

    _loader: ShardLoader
    _feed: Iterator[StepBatch] | None

    def __init__(self, config: TrainConfig, loaders: SplitLoaders, learner: Learner) -> None:
        """Open the loader of the first phase.

        Args:
            config: Settings of the run.
            loaders: Opens the loader of each phase.
            learner: The model and optimizer. It trains the weights that each phase selects.
        """
        self._config, self._loaders, self._learner = config, loaders, learner
        self._phases = phases_of(config)
        self.phase = self._phases[0]
        self._open(goes_on=bool(config.resume))

    @property
    def feed(self) -> Iterator[StepBatch]:
        """The loader's batches. After the first use, the loader accepts no saved state."""
        if self._feed is None:
            self._feed = step_feed(self._loader, self.phase.config.accumulation)
        return self._feed

    def config_at(self, step: int) -> TrainConfig:
        """Return the settings of a step's phase."""
        return phase_at(self._phases, step).config

    def ends_before(self, step: int) -> bool:
        """Return whether a step is after the current phase."""
        return step > self.phase.last

    def enter(self, step: int, *, goes_on: bool = False) -> None:
        """Enter the phase of a step.

        If the data changes, they are read from their beginning.

        Args:
            step: The next step.
            goes_on: Whether the caller will load a saved state of the loader.
        """
        before, self.phase = self.phase, phase_at(self._phases, step)
        if self.phase.changes != before.changes:
            self.close()
            self._open(goes_on=goes_on)
        self._learner.begin_phase(self.phase)
        self.log_phase()

    def log_phase(self) -> None:
        """Log what is trained, if there are phases or frozen weights."""
        if not self._config.phases and not self._config.chooses:
            return
        _log.info(
            "phase %d of %d, until step %d: trains %s of %s parameters",
            self.phase.number,
            len(self._phases),
            self.phase.last,
            f"{self._learner.trained_parameters[self.phase.number - 1]:,}",
            f"{sum(weight.numel() for weight in self._learner.model.parameters()):,}",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, in the same phase."""
        self._loader.load_state_dict(state)

    @property
    def remote(self) -> RemoteStats | None:
        """What the phase's data took from stores; None if the data are local."""
        return self._loader.stats().remote

    def close(self) -> None:
        """End the loader's workers."""
        self._loader.close()

    def _open(self, *, goes_on: bool) -> None:
        self._feed = None
        self._loader = self._loaders.train_loader(self.phase, goes_on=goes_on)
