"""Layers that keep only what enters them, and compute everything else again in the backward pass.

Gradients are the same, with dropout as well: what is computed again draws the same numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tokenfeed.pipeline.errors import ConfigError


def recompute_layers(model: nn.Module) -> None:
    """Make the layers of a model compute their activations again in the backward pass.

    Names of parameters do not change. Call this before the model is compiled.

    Raises:
        ConfigError: The model does not tell its layers.
    """
    blocks = list(getattr(model, "repeated_blocks", tuple)())
    if not blocks:
        raise ConfigError(
            f"`--recompute`: {type(model).__name__} has no `repeated_blocks()`, or none are known. "
            "Add that method, or leave --recompute out."
        )
    for block in blocks:
        block.forward = _again(block.forward)


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    # A function, not a partial: the compiler looks into it.
    def compute(*values: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*values, **named)
        return checkpoint(forward, *values, use_reentrant=False, **named)

    return compute
