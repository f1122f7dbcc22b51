"""The loss over a vocabulary without the logits of a micro-batch: they exist for some tokens at a
time, and their gradients are taken at once.

For GPT-2 all logits would be a third of a step's memory. Nothing is computed twice, for the loss is
a sum: its gradient is known as soon as a chunk's logits are there, and backward multiplies it.

Shapes: N tokens, D width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.format.schema import IGNORED

__all__ = ["chunk_tokens", "is_worth_chunks", "most_chunk_tokens", "vocabulary_loss"]

_BYTES_PER_LOGIT = 10
"""In half precision, in fp32, and their logarithms of the softmax."""
_CHUNK_BYTES, WORTH_BYTES = 1 << 30, 1 << 26
MOST_TOKENS = 8192
"""Of a chunk: the gradient of a frequent id's weight, a sum over them, stays in fp16's range."""


def is_worth_chunks(tokens: int, vocabulary_size: int) -> bool:
    """Whether logits take so much memory that it is worth the work of splitting them."""
    return tokens * vocabulary_size * _BYTES_PER_LOGIT > WORTH_BYTES


def most_chunk_tokens(vocabulary_size: int) -> int:
    """Tokens of the largest chunk."""
    fitting = _CHUNK_BYTES // (vocabulary_size * _BYTES_PER_LOGIT)
    return max(1, min(fitting, MOST_TOKENS))


def chunk_tokens(tokens: int, vocabulary_size: int) -> int:
    """Tokens of a chunk, where all chunks but the last are equal."""
    chunks = ceil_div(tokens, most_chunk_tokens(vocabulary_size))
    return ceil_div(tokens, max(1, chunks))


def vocabulary_loss(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Cross-entropy of `hidden_ND @ weight_VD.T`, summed over targets that are not `IGNORED`; fp32.

    Matrix products are computed in autocast's number format, and the weight's gradient is summed
    over chunks in the weight's own. Gradients cannot be differentiated again.
    """
    chunk = chunk_tokens(len(targets_N), len(weight_VD))
    loss: Tensor = _ChunkedLoss.apply(hidden_ND, weight_VD, targets_N, max(1, chunk))  # type: ignore[no-untyped-call]
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int
    ) -> Tensor:
        narrow_VD = weight_VD.to(_product_dtype(hidden_ND))
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        grad_ND = torch.empty_like(hidden_ND) if of_hidden else None
        grad_VD = torch.zeros_like(weight_VD) if of_weight else None
        loss = torch.zeros((), device=hidden_ND.device)
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            narrow_CD = hidden_ND[part].to(narrow_VD.dtype)
            log_shares_CV = F.linear(narrow_CD, narrow_VD).float().log_softmax(-1)
            targets_C1, counted_C1 = _split(targets_N[part])
            loss = loss - (log_shares_CV.gather(1, targets_C1) * counted_C1).sum()
            if grad_ND is None and grad_VD is None:
                continue
            error_CV = _error(log_shares_CV, targets_C1).to(narrow_VD.dtype).mul_(counted_C1)
            del log_shares_CV
            if grad_ND is not None:
                grad_ND[part] = error_CV @ narrow_VD
            if grad_VD is not None:
                grad_VD += error_CV.t() @ narrow_CD
        ctx.save_for_backward(grad_ND, grad_VD)
        return loss

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if grad is None else grad * factors[0] for grad in ctx.saved_tensors)
        return (*grads, None, None)


def _product_dtype(tensor: Tensor) -> torch.dtype:
    """What autocast computes matrix products in; without it, the tensor's own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def _split(targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Targets that can be looked up, and which of them count."""
    targets_C1 = targets_C[:, None]
    return targets_C1.clamp(min=0), targets_C1 != IGNORED


def _error(log_shares_CV: Tensor, targets_C1: Tensor) -> Tensor:
    """The gradient of the loss with respect to logits, in their place."""
    one = log_shares_CV.new_ones(()).expand_as(targets_C1)
    return log_shares_CV.exp_().scatter_add_(1, targets_C1, -one)
