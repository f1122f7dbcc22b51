"""Check before training that a model of `transformers` keeps documents apart.

Names and configs do not tell: a layer with a state, a convolution, positions of its own or a mask
left out would mix documents, and only the loss would know. A row of two documents must give what
the second gives alone; a padded row what it gives without padding. Price: two forwards of a dozen
tokens, on the host.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.trainer.data.attention import Reach, Scope
from tokenfeed.trainer.data.micro_batch import Head, MicroBatch
from tokenfeed.trainer.models.hf_attention import ScopesOnDemand, irreplaceable
from tokenfeed.trainer.models.hf_model import HubModel

_FIRST, _SECOND = 5, 7
"""Lengths of the two test documents, in tokens."""
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2
"""Share of the largest logit by which others may differ, in fp32 and in half precision."""


@torch.no_grad()
def try_out(model: HubModel, head: Head, name: str) -> None:
    """Find the reaches of a model's layers, and check that they attend to nothing else.

    Raises:
        ConfigError: The model attends in the wrong direction, or across documents.
    """
    model.eval()
    alone, reaches = _run(model, _one_document(head))
    model.reaches = reaches
    _check_reaches(model, head, name)
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


def _run(model: HubModel, micro_batch: MicroBatch) -> tuple[Tensor, frozenset[Reach]]:
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


def _has_plain_head(model: HubModel, head: Head, logits_BTV: Tensor) -> bool:
    """Return whether the logits are the head's matrix times the base model's output, to the last
    bit.

    Caps, scales, biases and extra layers make a difference."""
    last = model.model.get_output_embeddings()
    if model.model.base_model is model.model or type(last) is not nn.Linear:
        return False
    hidden_BTD = model.hidden(_one_document(head))
    return bool((F.linear(hidden_BTD, last.weight) == logits_BTV).all())


def _check_reaches(model: HubModel, head: Head, name: str) -> None:
    if not model.reaches:
        raise irreplaceable(name)
    if head.causal and not all(reach.causal for reach in model.reaches):
        raise ConfigError(
            f"`--model`={name}: reads both ways, and the task needs one that reads forwards. Take "
            "another model."
        )


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
