"""Attention of models of `transformers`: `attend`, under the name that they choose it by.

There is no mask function of this name, so `transformers` builds no mask, which would wait for the
device. What documents a slot sees comes with the call, as `scopes`: a scope for each reach that
layers of the model have. Whatever else a layer asks for and does not get here is refused.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.data.attention import Reach, Scope, attend, product_dtype

ATTENTION_NAME = "tokenfeed"

_NOT_DONE = {
    "softcap": "soft-capped attention",
    "s_aux": "attention sinks",
    "position_bias": "a bias by position",
}
"""Unsupported features that change the result, by the argument that requests them."""


class ScopesOnDemand(dict[Reach, Scope]):
    """Collects the reaches that a model asks for, while they are not known yet."""

    def __init__(self, scope: Scope, ids_BT: Tensor) -> None:
        super().__init__()
        self._scope, self._ids_BT = scope, ids_BT

    def __missing__(self, reach: Reach) -> Scope:
        self[reach] = self._scope.narrowed(reach, self._ids_BT)
        return self[reach]


def _attention(
    module: nn.Module,
    query_BHTK: Tensor,
    key_BHTK: Tensor,
    value_BHTK: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    scopes: Mapping[Reach, Scope] | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature that `transformers` calls. Returns (B, T, H, K)."""
    layer = type(module).__name__
    for name, what in _NOT_DONE.items():
        if asked.get(name) is not None:
            raise _cannot(layer, what)
    if attention_mask is not None:
        raise _cannot(layer, "a mask that it makes itself")
    if scopes is None:
        raise ConfigError(
            f"`--model`: {layer} does not receive the ends of documents. Use another model."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # What `transformers` calls a window counts the slot itself.
    scope = scopes[Reach(bool(causal), None if sliding_window is None else sliding_window - 1)]
    if scope.longest is not None and scope.mask_BHTT is None and dropout:
        raise ConfigError(
            f"`--model`: {layer} sets {dropout:.0%} of its attention weights to 0, and packed rows "
            "on a GPU cannot. Add --dropout 0 or --batching padded."
        )
    query, key, value = _in_one_dtype(query_BHTK, key_BHTK, value_BHTK)
    mixed_BHTK = attend(query, key, value, scope, scale=scaling, dropout=dropout)
    return mixed_BHTK.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)


def irreplaceable(name: str) -> ConfigError:
    """Return the error for a model whose layers do not choose attention by name."""
    return ConfigError(
        f"`--model`={name}: its attention cannot be replaced, and documents would see each other. "
        "Take another model, or a newer transformers."
    )


def _cannot(layer: str, what: str) -> ConfigError:
    return ConfigError(
        f"`--model`: {layer} needs {what}, which `train` has not. Take another model."
    )


def _in_one_dtype(*parts: Tensor) -> list[Tensor]:
    """Return tensors of one dtype, as the kernels need. Norms of queries and keys give fp32 under
    autocast."""
    return [part.to(product_dtype(parts[-1])) for part in parts]
