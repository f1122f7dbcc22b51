"""Select the task of a run: the task of its shards."""

from contextlib import suppress

import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import refuse_weights
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.datasets import first_of, open_tokenizer, run_manifest, shown
from tokenfeed.trainer.tasks.label_tasks import Classify, Score, Tag
from tokenfeed.trainer.tasks.language_modeling import (
    Chat,
    Completion,
    LanguageModelling,
    token_bytes,
)
from tokenfeed.trainer.tasks.task import Task

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (LanguageModelling, Completion, Chat, Classify, Score, Tag)
}
"""The class of each task, by the name in the manifest."""


def task_of(config: TrainConfig, device: torch.device) -> Task:
    """Return the task of a run, on the data sets of all its stages.

    Raises:
        ConfigError: The data sets do not fit each other, or `make_task` raised.
    """
    return make_task(config, run_manifest(config), device)


def make_task(config: TrainConfig, manifest: Manifest, device: torch.device) -> Task:
    """Return the task for the data sets of a manifest.

    Raises:
        ConfigError: The manifest's task is unknown, or the data set has no labels.
    """
    name = shown(config.shards)
    if manifest.task not in TASKS:
        raise ConfigError(
            f"{name}: unknown task {manifest.task}, expected one of {', '.join(TASKS)}. Install a "
            "newer tokenfeed."
        )
    refuse_weights(manifest.columns, name)
    task = TASKS[manifest.task](manifest)
    if isinstance(task, LanguageModelling):
        with suppress(ConfigError):  # export reports it; training goes on without bits per byte
            task.bytes_of_token = token_bytes(open_tokenizer(first_of(config.shards))).to(device)
    if task.outputs == 0:
        raise ConfigError(
            f"{name}: the data set has no labels. Run `pretokenize --task {manifest.task}` on a "
            "corpus with labels."
        )
    return task
