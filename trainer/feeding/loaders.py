"""The loaders of a run's splits, and how their batches become micro-batches of optimizer steps.

A step is a step of the loader: `accumulation` micro-batches over all ranks, of which each rank has
its share. A resumed run keeps the loader's steps. If --step-tokens was raised, several of them make
a step.
"""

import itertools
from collections.abc import Generator, Iterator
from functools import partial
from typing import NamedTuple

import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.manifest import SplitInfo
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.trainer.config.phases import Phase
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.attention import has_varlen
from tokenfeed.trainer.data.datasets import shown, source_of
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
from tokenfeed.trainer.tasks.task import Task

__all__ = ["Dealt", "Feeds", "check_rows", "is_apart", "step_feed"]

_SPLITS = ("train", "validation", "test")
"""Those that a run reads."""


class Feeds:
    """Open the splits of a run's data sets."""

    def __init__(
        self, config: TrainConfig, task: Task, device: torch.device, dtype: torch.dtype
    ) -> None:
        """
        Args:
            config: Says how rows become micro-batches.
            task: Says the same where `config` leaves it open.
            device: Where batches go.
            dtype: What attention is computed in.

        Raises:
            ConfigError: Settings contradict each other, or the task.
        """
        check_rows(config, task)
        self._config, self._device, self._manifest = config, device, task.manifest
        self._apart, self._causal = is_apart(config, task), task.causal
        self._varlen = has_varlen(device, dtype)
        self._training = self._policy(packed=is_packed(config, task))
        self._whole = self._policy(packed=task.packs)
        self.shape = self._shaper(self._training)
        """Makes micro-batches of the batches of `training`."""
        self.shape_whole = self._shaper(self._whole)
        """The same for those of `whole`."""

    def training(self, phase: Phase, *, goes_on: bool) -> ShardLoader:
        """The train split of a phase, shuffled, epoch after epoch, in steps that ranks share; data
        that comes again in a later phase comes in another order.

        Args:
            phase: Says which data.
            goes_on: Whether a saved state will be loaded, which has steps of its own.
        """
        config = self._config
        return self._open(
            "train",
            self._training,
            num_workers=self._num_workers(),
            epochs=None,
            step_size=None if goes_on else config.accumulation,
            source=source_of(phase.config.shards),
            seed=config.seed + phase.changes,
        )

    def whole(self, split: str, folder: str | None = None) -> ShardLoader:
        """A split once, of all data sets or of one, in the batches of its task. It is shuffled too,
        each time alike: packing in the order of length would let the longest documents alone speak
        for it."""
        return self._open(split, self._whole, num_workers=0, epochs=1, source=folder)

    def numbered(
        self, split: str, most: int | None, folder: str | None = None
    ) -> Generator[tuple[int, MicroBatch], None, None]:
        """This rank's micro-batches of `whole`, with numbers that depend on no rank.

        At most `most` count, over all ranks. A rank gets one beyond them without targets where
        others still compute, since no rank may be missing.
        """
        with self.whole(split, folder) as feed:
            batches = iter(feed)
            for first in itertools.count(0, feed.world_size):
                position = feed.position
                batch = next(batches, None) if most is None or first < most else None
                if batch is None:
                    return
                shown = self.shape_whole(batch)
                if most is not None and first + feed.rank >= most:
                    shown = shown.without_targets()
                yield (position.window << 32) + position.micro_batch + feed.rank, shown

    def micro_batches_of(self, tokens: int, split: SplitInfo) -> int:
        """The micro-batches of `whole` that have about so many tokens of a split; at least one."""
        return max(1, tokens // self._whole.tokens_per_batch(split.tokens / split.rows))

    def blanks(self) -> list[MicroBatch]:
        """An empty micro-batch of every shape that `training` and `whole` give where --compile
        fills them up: nothing is compiled later."""
        found = self._blanks(self._training, self.shape)
        if self._whole != self._training:
            found += self._blanks(self._whole, self.shape_whole)
        return found

    def largest_blank(self) -> MicroBatch:
        """An empty micro-batch of the largest shape that `training` gives."""
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
        source: str | Mixture | None = None,
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
        )

    def _num_workers(self) -> int:
        """As told, or 2 for a GPU and none on the CPU, where they would compete with training."""
        if self._config.num_workers is not None:
            return self._config.num_workers
        return 0 if self._device.type == "cpu" else 2


def check_rows(config: TrainConfig, task: Task) -> None:
    """A label of a row is neither shared with other rows nor of a part.

    Raises:
        ConfigError: It would be.
    """
    if task.kind != "row":
        return
    if is_packed(config, task):
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
    """Whether packed documents are kept apart.

    Raises:
        ConfigError: They must be, and are not to be.
    """
    if config.attention == "auto":
        return task.apart
    if config.attention == "rows" and not task.causal:
        raise ConfigError(
            f"`--attention`: rows is for models that read forwards, and {task.name} looks both "
            "ways: documents would see each other. Leave it out."
        )
    return config.attention == "documents"


class Dealt(NamedTuple):
    """A batch, and where it stands."""

    batch: Batch
    part: int
    """Which micro-batch of its step, over all ranks."""
    ends_step: bool


def step_feed(loader: ShardLoader, accumulation: int) -> Iterator[Dealt]:
    """The batches of a loader, from the beginning of a step on.

    Raises:
        ConfigError: The ranks are more than the micro-batches, or these make no whole step.
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
    return _dealt(loader, accumulation // of_loader, of_loader)


def _dealt(loader: ShardLoader, together: int, of_loader: int) -> Iterator[Dealt]:
    batches = iter(loader)
    while True:
        for nth in range(together):
            part, ends = nth * of_loader + loader.rank, False
            while not ends:
                batch = next(batches)
                ends = batch.ends_step
                yield Dealt(batch, part, ends and nth + 1 == together)
                part += loader.world_size
