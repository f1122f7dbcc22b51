"""Layers that store less for the backward pass, and compute the rest again in that pass.

    none        everything is kept
    selective   matrix products and attention are kept; norms, activations and sums are computed
                again, which costs little
    full        only what enters a layer is kept; each layer's forward is computed twice

Gradients are the same, with dropout as well: what is computed again draws the same numbers.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import RecomputeName

_KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
)


def recompute_layers(model: nn.Module, how: RecomputeName) -> None:
    """Make the layers of a model compute activations again in the backward pass, as `how` sets.

    Names of parameters do not change. Call this before the model is compiled.

    Raises:
        ConfigError: The model does not tell its layers.
    """
    if how == "none":
        return
    blocks = list(getattr(model, "repeated_blocks", tuple)())
    if not blocks:
        raise ConfigError(
            f"`--recompute`={how}: {type(model).__name__} has no `repeated_blocks()`, or none are "
            "known. Add that method, or leave --recompute out."
        )
    for block in blocks:
        block.forward = _again(block.forward, _contexts(how))


def _again(forward: Callable[..., Any], contexts: dict[str, Any]) -> Callable[..., Any]:
    # A function, not a partial: the compiler looks into it.
    def compute(*values: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*values, **named)
        return checkpoint(forward, *values, use_reentrant=False, **contexts, **named)

    return compute


def _contexts(how: RecomputeName) -> dict[str, Any]:
    if how == "full":
        return {}
    return {"context_fn": partial(create_selective_checkpoint_contexts, _kept_operators())}


def _kept_operators() -> list[Any]:
    """Return the operators of these names that this build of torch has."""
    with contextlib.suppress(ImportError):
        import torch.nn.attention.varlen  # torch 2.10: makes an operator known
    found = []
    for name in _KEPT:
        space, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, space), operator, None)
        if packet is not None:
            found.append(packet.default)
    return found
