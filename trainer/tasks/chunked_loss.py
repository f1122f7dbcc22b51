"""The cross-entropy of a vocabulary, computed in chunks of tokens.

All logits of a micro-batch would be a third of GPT-2's memory. The loss is a sum, so the gradient
of a chunk is known as soon as its logits are: the forward pass computes both, and the backward
pass only scales the gradients. Nothing is computed twice.

Memory traffic decides the speed. `--compile` turns the step from logits to loss and error into one
function that keeps nothing of a chunk's size but its result. A logit in half precision then takes
12 to 14 bytes: written once, read by the softmax and by the error, and its error written once and
read by two products. The same operators take 38 bytes when they run one by one.

Shapes: N tokens, C tokens of a chunk, D width, V vocabulary.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.format.schema import IGNORED

_BYTES_PER_LOGIT, _COMPILED_BYTES_PER_LOGIT = 10, 4
"""Memory of a chunk: logits in half precision, in fp32, and their log-softmax. With `--compile`:
logits and their gradient in half precision."""
_CHUNK_BYTES, _COMPILED_CHUNK_BYTES, WORTH_BYTES = 1 << 30, 1 << 31, 1 << 26
MOST_TOKENS = 8192
"""Tokens of the largest chunk."""


def is_worth_chunks(tokens: int, vocabulary_size: int) -> bool:
    """Return whether logits take so much memory that the loss should be computed in chunks."""
    return tokens * vocabulary_size * _BYTES_PER_LOGIT > WORTH_BYTES


def chunk_tokens(tokens: int, vocabulary_size: int, *, compiled: bool = False) -> int:
    """Return the tokens of a chunk. All chunks but the last are equal.

    The gradient of the head is read and written once per chunk, so large chunks move fewer bytes.
    """
    fitting = _CHUNK_BYTES // (vocabulary_size * _BYTES_PER_LOGIT)
    if compiled:
        fitting = _COMPILED_CHUNK_BYTES // (vocabulary_size * _COMPILED_BYTES_PER_LOGIT)
    chunks = ceil_div(tokens, max(1, min(fitting, MOST_TOKENS)))
    return max(1, ceil_div(tokens, max(1, chunks)))


def vocabulary_loss(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, compiled: bool = False
) -> Tensor:
    """Return the fp32 sum of the cross-entropy of `hidden_ND @ weight_VD.T` over all targets that
    are not `IGNORED`.

    Matrix products are computed in autocast's dtype. The weight's gradient is summed over chunks
    in the weight's own dtype. Gradients cannot be differentiated again.
    """
    chunk = chunk_tokens(len(targets_N), len(weight_VD), compiled=compiled)
    loss: Tensor = _ChunkedLoss.apply(hidden_ND, weight_VD, targets_N, chunk, compiled)  # type: ignore[no-untyped-call]
    return loss


def loss_and_error(
    logits_CV: Tensor, targets_C: Tensor, *, wants_error: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of a chunk, and its gradient by the logits in their dtype."""
    counted_C1 = (targets_C != IGNORED)[:, None]
    targets_C1 = targets_C.clamp(min=0)[:, None]
    log_shares_CV = logits_CV.float().log_softmax(-1)
    loss = -(log_shares_CV.gather(1, targets_C1) * counted_C1).sum()
    if not wants_error:
        return loss, None
    if torch.compiler.is_compiling():  # a scatter would be a kernel of its own, on fp32
        ids_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
        error_CV = log_shares_CV.exp() - (ids_V == targets_C1).float()
    else:
        minus_one = log_shares_CV.new_full((), -1).expand_as(targets_C1)
        error_CV = log_shares_CV.exp_().scatter_add_(1, targets_C1, minus_one)
    return loss, error_CV.to(logits_CV.dtype).mul_(counted_C1)


@cache
def compiled_loss_and_error() -> Any:
    """Return `loss_and_error`, compiled when it is first called."""
    return torch.compile(loss_and_error, dynamic=False)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        chunk: int,
        compiled: bool,
    ) -> Tensor:
        narrow_VD = weight_VD.to(product_dtype(hidden_ND))
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        grad_ND = torch.empty_like(hidden_ND) if of_hidden else None
        grad_VD = torch.zeros_like(weight_VD) if of_weight else None
        loss = torch.zeros((), device=hidden_ND.device)
        compute: Any = compiled_loss_and_error() if compiled else loss_and_error
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            narrow_CD = hidden_ND[part].to(narrow_VD.dtype)
            summed, error_CV = compute(
                F.linear(narrow_CD, narrow_VD), targets_N[part], wants_error=of_hidden or of_weight
            )
            loss = loss + summed
            if grad_ND is not None and grad_ND.dtype == narrow_VD.dtype:
                torch.mm(error_CV, narrow_VD, out=grad_ND[part])
            elif grad_ND is not None:
                grad_ND[part] = error_CV @ narrow_VD
            if grad_VD is not None:
                grad_VD += error_CV.t() @ narrow_CD
        ctx.save_for_backward(grad_ND, grad_VD)
        return loss

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if grad is None else grad.mul_(factors[0]) for grad in ctx.saved_tensors)
        return (*grads, None, None, None)


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of matrix products: autocast's, or without autocast the tensor's own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
