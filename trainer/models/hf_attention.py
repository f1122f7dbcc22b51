"""Attention of models of `transformers`: `attend`, under the name that they choose it by; and a
check before training that a model keeps documents apart.

There is no mask function of this name, so `transformers` builds no mask, which would wait for the
device. What documents a slot sees comes with the call, as `scopes`: a scope for each reach that
layers of the model have. Whatever else a layer asks for and does not get here is refused.

Names and configs do not tell: a layer with a state, a convolution, positions of its own or a mask
left out would mix documents, and only the loss would know. A row of two documents must give what
the second gives alone; a padded row what it gives without padding. Price: two forwards of a dozen
tokens, on the host.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.trainer.data.attention import Reach, Scope, attend, product_dtype
from tokenfeed.trainer.data.micro_batch import Head, MicroBatch

if TYPE_CHECKING:
    from tokenfeed.trainer.models.hf_model import HubModel

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
    mask_BHTT, keys = scope.mask_BHTT, key_BHTK.shape[2]
    if mask_BHTT is not None and mask_BHTT.shape[3] > keys:  # the cache has the window alone
        scope = replace(scope, mask_BHTT=mask_BHTT[..., -keys:])
    # Norms of queries and keys give fp32 under autocast, and the kernels need one dtype.
    dtype = product_dtype(value_BHTK)
    query, key, value = (part.to(dtype) for part in (query_BHTK, key_BHTK, value_BHTK))
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


_FIRST, _SECOND = 5, 7
"""Lengths of the two test documents, in tokens."""
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2
"""Logits that differ by at most this share of the largest one count as equal: in fp32, and in half
precision."""


@torch.no_grad()
def try_out(model: "HubModel", head: Head, name: str) -> None:
    """Find the reaches of a model's layers, and check that they attend to nothing else.

    Raises:
        ConfigError: The model attends in the wrong direction, or across documents.
    """
    model.eval()
    alone, reaches = _run(model, _one_document(head))
    model.reaches = reaches
    if not reaches:
        raise irreplaceable(name)
    if head.causal and not all(reach.causal for reach in reaches):
        raise ConfigError(
            f"`--model`={name}: reads both ways, and the task needs one that reads forwards. Take "
            "another model."
        )
    model.has_plain_head = head.kind == "vocabulary" and _has_plain_head(model, head, alone)
    beside, _ = _run(model, _padded(head) if head.kind == "row" else _packed(head))
    model.train()
    of_second = beside if head.kind == "row" else beside[:, _FIRST:]
    share = _TOLERANCE if alone.dtype == torch.float32 else _HALF_TOLERANCE
    if not bool((of_second - alone).abs().max() <= share * alone.abs().max()):
        raise ConfigError(
            f"`--model`={name}: mixes documents that share a row, or tokens with padding, by other "
            "ways than attention. Take another model."
        )


def _run(model: "HubModel", micro_batch: MicroBatch) -> tuple[Tensor, frozenset[Reach]]:
    scopes = ScopesOnDemand(micro_batch.scope, micro_batch.ids_BT)
    try:
        logits = model.logits(micro_batch, scopes)
    except ConfigError:
        raise
    except Exception as error:  # what models that want other inputs raise is not foreseen
        raise ConfigError(
            f"`--model`: {type(model.model).__name__} cannot be called with ids, positions and "
            f"`scopes` ({' '.join(str(error).split())}). Take another model."
        ) from error
    return logits, frozenset(scopes)


def _has_plain_head(model: "HubModel", head: Head, logits_BTV: Tensor) -> bool:
    """Return whether the logits are the head's matrix times the base model's output, to the last
    bit.

    Caps, scales, biases and extra layers make a difference."""
    last = model.model.get_output_embeddings()
    if model.model.base_model is model.model or type(last) is not nn.Linear:
        return False
    hidden_BTD = model.hidden(_one_document(head))
    return bool((F.linear(hidden_BTD, last.weight) == logits_BTV).all())


def _one_document(head: Head) -> MicroBatch:
    is_token_BT = torch.ones((1, _SECOND), dtype=torch.bool) if head.kind == "row" else None
    scope, positions_T = Scope(causal=head.causal), torch.arange(_SECOND)
    return _micro_batch(_ids(head)[:, _FIRST:], positions_T, scope, is_token_BT)


def _packed(head: Head) -> MicroBatch:
    ids_BT = _ids(head)
    is_second_T = torch.arange(ids_BT.shape[1]) >= _FIRST
    mask_TT = is_second_T[:, None] == is_second_T
    scope = Scope(head.causal, (mask_TT.tril() if head.causal else mask_TT)[None, None])
    positions_T = torch.cat((torch.arange(_FIRST), torch.arange(_SECOND)))
    return _micro_batch(ids_BT, positions_T, scope)


def _padded(head: Head) -> MicroBatch:
    """Return the second document, followed by padding."""
    ids_BT = _ids(head).roll(-_FIRST, dims=1)
    positions_T = torch.arange(ids_BT.shape[1])
    is_token_BT = (positions_T < _SECOND)[None]
    scope = Scope(causal=False, mask_BHTT=is_token_BT[:, None, None])
    return _micro_batch(ids_BT, positions_T, scope, is_token_BT)


def _micro_batch(
    ids_BT: Tensor, positions_T: Tensor, scope: Scope, is_token_BT: Tensor | None = None
) -> MicroBatch:
    labels_BT = torch.full_like(ids_BT, IGNORED)
    types_BT = torch.zeros_like(ids_BT)
    return MicroBatch(ids_BT, labels_BT, positions_T[None], scope, is_token_BT, types_BT)


def _ids(head: Head) -> Tensor:
    """Return the first document, then the second. Torch's random state does not change."""
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, head.vocabulary_size, (1, _FIRST + _SECOND), generator=random)
