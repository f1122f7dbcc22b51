"""The loaders of a run's splits.

A step of the run is a step of the loader: `accumulation` micro-batches over all ranks, of which
each rank gets its share.
"""

import dataclasses
import itertools
from collections.abc import Generator
from typing import Any

import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.manifest import SplitInfo
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.pipeline.planning.stages import Stage
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.attention import Separation
from tokenfeed.trainer.data.datasets import shown, source_of, training_source
from tokenfeed.trainer.data.micro_batch import MicroBatch, Shaper
from tokenfeed.trainer.feeding.batch_policy import (
    Policy,
    is_packed,
    largest_shape,
    long_rows_of,
    make_policy,
    shapes,
)
from tokenfeed.trainer.tasks.task import Task

_SPLITS = ("train", "validation", "test")
"""The splits that a run reads."""


class SplitLoaders:
    """Opens the splits of a run's data sets."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        device: torch.device,
        *,
        separation: Separation = "mask",
    ) -> None:
        """
        Args:
            config: Settings of the batching.
            task: Its preferences apply where a setting is auto.
            device: The device that batches are moved to.
            separation: What separates packed documents.

        Raises:
            ConfigError: Settings contradict each other, or the task.
        """
        check_rows(config, task)
        self._config, self._device, self._manifest = config, device, task.manifest
        self.policy = self._policy_of(config.sequence_length)
        """The batching of training."""
        self._evaluation = self._policy(config, packed=task.head.causal)
        self.shape = Shaper(
            causal=task.head.causal,
            apart=is_apart(config, task),
            separation=separation,
            compiled=config.compile,
        )
        """Makes micro-batches from the batches of the loaders."""

    def train_loader(self) -> ShardLoader:
        """Return a loader of the train split: shuffled, without end, with steps that are divided
        among the ranks.

        Raises:
            ConfigError: A step has fewer micro-batches than there are ranks.
        """
        config, on_cpu = self._config, self._device.type == "cpu"
        workers = config.num_workers
        if workers is None:  # on a CPU, workers would slow training down
            workers = 0 if on_cpu else 2
        loader = self.open(
            "train",
            self.policy,
            training_source(config, self._policy_of),
            num_workers=workers,
            epochs=None,
            micro_batches_per_step=config.accumulation,
            order=config.order,
            skip=config.skip,
        )
        if loader.world_size > config.accumulation:
            raise ConfigError(
                f"`--micro-batch-tokens`: {loader.world_size} ranks share {config.accumulation} "
                "micro-batches of a step, so some would have none. Lower it, as auto does, or "
                f"start at most {config.accumulation} ranks."
            )
        return loader

    def evaluation_loader(self, split: str, folder: str | None = None) -> ShardLoader:
        """Return a loader that reads a split once, of all data sets or of one.

        It is shuffled, always in the same way. Unshuffled, packing starts with the longest
        documents, and an evaluation of a part of the split would see no others.
        """
        return self.open(split, self._evaluation, folder)

    def evaluation_batches(
        self, split: str, most: int | None, folder: str | None = None
    ) -> Generator[MicroBatch, None, None]:
        """Yield this rank's micro-batches of an evaluation.

        At most `most` micro-batches count, over all ranks. All ranks must compute equally often. So
        if the last micro-batches are fewer than the ranks, the remaining ranks get a micro-batch
        without targets.
        """
        with self.evaluation_loader(split, folder) as feed:
            batches = iter(feed)
            for first in itertools.count(0, feed.world_size):
                batch = next(batches, None) if most is None or first < most else None
                if batch is None:
                    return
                micro_batch = self.shape(batch)
                if most is not None and first + feed.rank >= most:
                    micro_batch = micro_batch.without_targets()
                yield micro_batch

    def micro_batches_of(self, tokens: int, split: SplitInfo) -> int:
        """Return how many micro-batches of an evaluation hold about `tokens` tokens; at least 1."""
        return max(1, tokens // self._evaluation.tokens_per_batch(split.tokens / split.rows))

    def blanks(self) -> list[MicroBatch]:
        """Return an empty micro-batch of every shape in training and evaluation with --compile.

        Once the model is compiled for them, no step compiles again.
        """
        longest = max(split.longest_row for split in self._manifest.splits.values())
        return [
            self._like(policy).blank_like(rows, length)
            for policy in dict.fromkeys((self.policy, *self._of_stages(), self._evaluation))
            for rows, length in shapes(policy, longest)
        ]

    def largest_shape(self) -> tuple[int, int]:
        """Return rows and length of the largest micro-batch of training."""
        return largest_shape(self.policy, self._manifest.split("train").longest_row)

    def first(self) -> MicroBatch:
        """Return the first micro-batch of training, which shows how documents share rows."""
        return self._like(self.policy)

    def _like(self, policy: Policy) -> MicroBatch:
        with self.open("train", policy) as feed:
            return self.shape(next(iter(feed)))

    def _policy(self, config: TrainConfig, *, packed: bool) -> Policy:
        return make_policy(
            config,
            packed=packed,
            on_gpu=self._device.type != "cpu",
            long_rows=long_rows_of(config, self._manifest),
        )

    def _policy_of(self, length: int) -> Policy:
        """Return the policy of a stage with sequences of this length."""
        config = dataclasses.replace(self._config, sequence_length=length)
        return self._policy(config, packed=is_packed(config, self._manifest))

    def _of_stages(self) -> list[Policy]:
        lengths = (stage.sequence_length for stage in self._config.mixing)
        return [self._policy_of(length) for length in lengths if length]

    def open(
        self,
        split: str,
        policy: Policy,
        source: str | Mixture | list[Stage] | None = None,
        **options: Any,
    ) -> ShardLoader:
        """Return a loader of a split: of one epoch, unless `options` of `ShardLoader` say more."""
        config = self._config
        settings: dict[str, Any] = {
            "seed": config.seed,
            "targets": config.targets,
            "num_workers": 0,
            "epochs": 1,
            "micro_batches_per_step": 1,
            "cache_dir": config.cache_dir,
            "cache_bytes": config.cache_bytes,
        }
        return ShardLoader(
            source or source_of(config.shards),
            batching=policy,
            split=split,
            device=self._device,
            **settings | options,
        )


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
    if config.attention == "rows" and not task.head.causal:
        raise ConfigError(
            f"`--attention`: rows is for causal models, and {task.name} attends in both "
            "directions: documents would see each other. Leave it out."
        )
    return config.attention == "documents"
