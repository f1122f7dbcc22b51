"""Which weights are trained: those whose names match a pattern. The others stay as they are."""

import difflib
import re
from collections.abc import Collection

from torch import nn

from tokenfeed.pipeline.errors import ConfigError

__all__ = ["count_parameters", "train_only", "trainable_names"]

_NEAREST = 3


def trainable_names(model: nn.Module, pattern: str | None) -> frozenset[str]:
    """The names of the weights that match, with all names of one that has several.

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
    """Let the weights of these names be trained, and no others."""
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in names)


def count_parameters(model: nn.Module, names: Collection[str]) -> int:
    """Numbers in the weights of these names."""
    return sum(weight.numel() for name, weight in model.named_parameters() if name in names)
