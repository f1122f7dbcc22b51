"""The weights that a run starts from (--init-from), from another run, one of its
checkpoints, or an exported folder.

Weights are matched by name and shape. The adapters of a run go on in a run with the same adapters.
Otherwise they are merged into the weights.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.checkpoints.checkpoint_files import (
    CONTENT_FILE,
    Checkpoint,
    Checkpoints,
    part_of,
    reading,
    unshared,
)
from tokenfeed.trainer.config.run_config import CONFIG_FILE, TrainConfig, alpha_of, phase_folders
from tokenfeed.trainer.data.datasets import read_manifest, shown
from tokenfeed.trainer.data.micro_batch import Head
from tokenfeed.trainer.distributed.world import State
from tokenfeed.trainer.loop.model_export import Exported, hub_names_of
from tokenfeed.trainer.models.build import add_adapters, choose_trainable
from tokenfeed.trainer.optim.train_state import kept_state

_OF_ADAPTERS = ("lora", "lora_alpha", "lora_target", "trainable")
"""Settings of a run on which the names in its checkpoints depend."""

_log = logging.getLogger(__name__)


def read_initial_weights(model: nn.Module, head: Head, config: TrainConfig) -> None:
    """Overwrite the weights of a new model with the weights of `config.init_from`. Log the names
    without a match. If the adapters of that run go on, add them.

    Raises:
        ConfigError: The folder has no weights, or weights of another tokenizer, or none that fits.
        ResumeError: The checkpoint is damaged.
    """
    folder = cast(Path, config.init_from)
    checkpoint = _checkpoint_of(folder)
    if checkpoint is None:
        _read_exported(folder, model, config)
        return
    _check_tokenizer(folder, checkpoint.meta.tokenizer, config)
    found = part_of(checkpoint.read(prefix="model."), "model.")
    saved = checkpoint.meta.config
    theirs = dataclasses.replace(config, **{k: saved[k] for k in _OF_ADAPTERS if k in saved})
    if theirs.lora is None:
        _overwrite(model.state_dict(), found, folder, config)
        return
    _check_base(folder, checkpoint, config)
    goes_on = _adapters_of(theirs) == _adapters_of(config)
    add_adapters(model, head, config if goes_on else theirs)
    choose_trainable(model, theirs)  # its weights are in the checkpoint
    _overwrite(_saved_state(model, checkpoint, theirs), found, folder, config)
    if not goes_on:
        model.merge()  # type: ignore[operator]


def _checkpoint_of(folder: Path) -> Checkpoint | None:
    """Return the checkpoint that a folder is or has; None if it is no run."""
    if (folder / CONTENT_FILE).is_file():
        with reading(folder):
            return Checkpoint.open(folder)
    for run_dir in reversed([folder, *phase_folders(folder)]):
        checkpoints = Checkpoints.of_run(run_dir)
        if checkpoints.latest():
            return checkpoints.open()
    return None


def _check_tokenizer(folder: Path, theirs: str, config: TrainConfig) -> None:
    ours = read_manifest(config.shards).tokenizer.xxh3
    if theirs and theirs != ours:
        raise ConfigError(
            f"`--init-from`={folder}: was trained with another tokenizer: its tokenizer.json has "
            f"the checksum {theirs}, and that of {shown(config.shards)} has {ours}. Run "
            "`pretokenize` with the tokenizer of that run."
        )


def _adapters_of(config: TrainConfig) -> tuple[int | None, int | None, str]:
    """Return what adapters must have in common to go on."""
    alpha = alpha_of(config.lora, config.lora_alpha)
    return config.lora, alpha, config.lora_target.replace(" ", "")


def _check_base(folder: Path, checkpoint: Checkpoint, config: TrainConfig) -> None:
    """Reject adapters of another model, whose own weights are not in the checkpoint."""
    model = checkpoint.meta.config["model"]
    if model != config.model:
        raise ConfigError(
            f"`--init-from`={folder}: has adapters for --model {model}, and --model is "
            f"{config.model}. Take the same model, or export that run with `train --export`."
        )


def _saved_state(model: nn.Module, checkpoint: Checkpoint, theirs: TrainConfig) -> State:
    """Return the weights of a model that a checkpoint of a run with adapters has: frozen weights
    are absent if they come from the hf: model."""
    begun = checkpoint.meta.config.get("init_from")
    return kept_state(model, dataclasses.replace(theirs, init_from=begun))


def _read_exported(folder: Path, model: nn.Module, config: TrainConfig) -> None:
    about = Exported.of(folder)
    if about is None and (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"`--init-from`={folder}: this run has no checkpoint yet. Resume it first."
        )
    if about is None:
        raise ConfigError(
            f"`--init-from`={folder}: is neither a run of `train`, nor one of its checkpoints, nor "
            f"a folder of `train --export`. A model of transformers is --model hf:{folder}."
        )
    _check_tokenizer(folder, about.tokenizer, config)
    live = hub_names_of(model, about.head) if about.has_hub_names else model.state_dict()
    found: State = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            found |= load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: the weights are damaged ({error}). Export again.") from error
    _overwrite(live, found, folder, config)


@torch.no_grad()
def _overwrite(live: State, found: State, folder: Path, config: TrainConfig) -> None:
    """Copy all tensors whose names and shapes are equal, and log the others.

    Raises:
        ConfigError: No tensor is equal.
    """
    live = unshared(live)
    fitting = [name for name in live if name in found and live[name].shape == found[name].shape]
    if not fitting:
        raise ConfigError(
            f"`--init-from`={folder}: none of its {len(found)} weights has a name and a shape of "
            f"--model {config.model}: it has {_listed(found)}, the model has {_listed(live)}."
        )
    for name in fitting:
        live[name].copy_(found[name])
    _log.info("the run starts with %d of the %d weights in %s", len(fitting), len(found), folder)
    if fresh := sorted(live.keys() - {*fitting}):
        _log.info("%s has no such weights, so they start at random: %s", folder, ", ".join(fresh))
    if unused := sorted(found.keys() - {*fitting}):
        _log.info("the model has no place for these weights of %s: %s", folder, ", ".join(unused))


def _listed(state: Mapping[str, torch.Tensor], most: int = 3) -> str:
    names = [f"{name} ({'x'.join(map(str, state[name].shape))})" for name in sorted(state)[:most]]
    return ", ".join(names) + (", ..." if len(state) > most else "")
