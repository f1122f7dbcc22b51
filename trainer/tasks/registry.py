"""Which task a run trains: what the shards were made for, or what --objective makes of them."""

from collections.abc import Callable

import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.datasets import first_of, run_manifest, shown
from tokenfeed.trainer.tasks.classification import Classify
from tokenfeed.trainer.tasks.language_modeling import (
    Completion,
    LanguageModelling,
    Masked,
    SpecialIds,
)
from tokenfeed.trainer.tasks.regression import Score
from tokenfeed.trainer.tasks.tagging import Tag
from tokenfeed.trainer.tasks.task import Task

__all__ = ["TASKS", "make_task", "task_of"]

TASKS: dict[str, Callable[[Manifest, int], Task]] = {
    task.name: task for task in (LanguageModelling, Completion, Classify, Score, Tag)
}
"""What is trained on shards, by the task in their manifest."""


def task_of(config: TrainConfig, device: torch.device) -> Task:
    """The task that a run learns, of the data sets of all its phases.

    Raises:
        ConfigError: As `make_task`; or data sets do not fit each other.
    """
    return make_task(config, run_manifest(config), device)


def make_task(config: TrainConfig, manifest: Manifest, device: torch.device) -> Task:
    """The task of data sets that have one.

    Raises:
        ConfigError: The shards are of a task that is unknown here, or not for --objective.
    """
    name = shown(config.shards)
    if config.objective == "masked":
        if manifest.task != "lm":
            raise ConfigError(
                f"`--objective`: masked learns from documents, and {name} was made for "
                f"`--task {manifest.task}`. Run `pretokenize --task lm`, or leave --objective out."
            )
        special = SpecialIds.from_shards(first_of(config.shards))
        return Masked(manifest, config.seed, special, device)
    if manifest.task not in TASKS:
        raise ConfigError(
            f"{name}: was made for `--task {manifest.task}`, and `train` learns only "
            f"{', '.join(TASKS)}. A newer tokenfeed may know it."
        )
    task = TASKS[manifest.task](manifest, config.seed)
    if task.outputs == 0:
        raise ConfigError(
            f"{name}: names no labels, so there is nothing to tell apart. Run "
            f"`pretokenize --task {manifest.task}` on a corpus that has them."
        )
    return task
