"""Weights of a model: which are trained, and which a checkpoint keeps.

A run trains the weights whose names match a pattern; the others stay as they are. A checkpoint
keeps the weights that cannot be read again: weights that training changes, and weights that were
drawn or loaded from elsewhere. Untrained weights of `transformers` are loaded again by the model's
name.
"""

import difflib
import re
from collections.abc import Collection

from torch import nn

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.trainer.checkpoints.checkpoint_format import Checkpoint, part_of, unshared
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.distributed.world import State

_NEAREST = 3


def trainable_names(model: nn.Module, pattern: str | None) -> frozenset[str]:
    """Return the names of the weights that match. If a weight has several names, return all of
    them.

    Args:
        model: Whose weights.
        pattern: A regular expression, searched for anywhere in a name; None takes what is trainable
            now.

    Raises:
        ConfigError: No name matches.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    if pattern is None:
        return frozenset(name for name, weight in weights.items() if weight.requires_grad)
    search = re.compile(pattern).search
    matching = {id(weight) for name, weight in weights.items() if search(name)}
    if not matching:
        near = difflib.get_close_matches(pattern, weights, n=_NEAREST, cutoff=0)
        raise ConfigError(
            f"`--trainable`={pattern}: no weight of the model has a name that matches. The nearest "
            f"are {', '.join(near)}."
        )
    return frozenset(name for name, weight in weights.items() if id(weight) in matching)


def train_only(model: nn.Module, names: Collection[str]) -> None:
    """Train the weights of these names, and freeze all others."""
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in names)


def count_parameters(model: nn.Module, names: Collection[str]) -> int:
    """Return the number of parameters in the weights of these names."""
    return sum(weight.numel() for name, weight in model.named_parameters() if name in names)


def product_weights(model: nn.Module) -> dict[str, int]:
    """Return the sizes of the weights in matrix products.

    The weight of an embedding is included only if the head shares it.
    """
    tables = [part for part in model.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
    outside = {id(weight) for table in tables for weight in table.parameters()}
    outside.discard(id(getattr(model, "head_weight", None)))
    return {
        name: weight.numel()
        for name, weight in model.named_parameters()
        if weight.dim() >= 2 and id(weight) not in outside
    }


def given_weights(model: nn.Module, config: TrainConfig) -> frozenset[str]:
    """The names of weights that come with the model of a run, and that it never trains: its
    checkpoints leave them out. To be asked of a model as it was made."""
    if not config.reads_again:
        return frozenset()
    trained = frozenset[str]().union(
        *(trainable_names(model, part.trainable) for part in config.phase_configs)
    )
    drawn = {f"model.{name}" for name in getattr(model, "fresh", ())}
    names = dict(model.named_parameters(remove_duplicate=False))
    return frozenset(names.keys() - drawn - trained)


def kept_state(model: nn.Module, given: Collection[str]) -> State:
    """Return the model's state without the weights of these names."""
    return {name: value for name, value in model.state_dict().items() if name not in given}


def kept_weights(model: nn.Module, given: Collection[str], checkpoint: Checkpoint) -> State:
    """Return the weights of `kept_state`, which a checkpoint overwrites.

    Raises:
        ResumeError: The checkpoint is of another model.
    """
    ours = kept_state(model, given)
    kinds = part_of(checkpoint.content.tensors, "model.")
    expected = {name: tuple(value.shape) for name, value in unshared(ours).items()}
    found = {name: kind.shape for name, kind in kinds.items()}
    if expected != found:
        name = min(name for name, _ in expected.items() ^ found.items())
        raise ResumeError(
            f"cannot resume: the checkpoint has other weights than this model: {name} is "
            f"{_shape(found.get(name))} there and {_shape(expected.get(name))} here. Give the "
            "--model, --lora, --lora-target and --trainable that it was made with."
        )
    return ours


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "a number"
