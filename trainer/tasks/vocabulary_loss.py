"""The cross-entropy of a vocabulary, in chunks of tokens.

All logits of a micro-batch would be a third of GPT-2's memory, so the cross-entropy of a vocabulary
is computed in chunks of tokens. The loss is a sum, so the gradient of a chunk is known as soon as
its logits are: the forward pass computes both, and the backward pass only scales the gradients.
Nothing is computed twice.

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
from tokenfeed.trainer.data.attention import product_dtype
from tokenfeed.trainer.tasks.task import losses_of

_BYTES_PER_LOGIT, _COMPILED_BYTES_PER_LOGIT = 10, 4
"""Memory of a chunk: logits in half precision, in fp32, and their log-softmax. With `--compile`:
logits and their gradient in half precision."""
_CHUNK_BYTES, _COMPILED_CHUNK_BYTES, WORTH_BYTES = 1 << 30, 1 << 31, 1 << 26
MOST_TOKENS = 8192
"""Tokens of the largest chunk."""


def is_large(tokens: int, vocabulary_size: int) -> bool:
    """Return whether the logits of some tokens are so large that chunks are worth it."""
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
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    compiled: bool = False,
    factor: Tensor | None = None,
) -> Tensor:
    """Return the fp32 sum of the cross-entropy of `hidden_ND @ weight_VD.T` over all targets that
    are not `IGNORED`.

    Matrix products are computed in autocast's dtype. The weight's gradient is summed over chunks
    in the weight's own dtype. Gradients cannot be differentiated again. They are computed as those
    of the loss times `factor`, so that a scale of the loss keeps them in the range of fp16.
    """
    chunk = chunk_tokens(len(targets_N), len(weight_VD), compiled=compiled)
    learns = torch.is_grad_enabled()  # `apply` turns it off
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, targets_N, chunk, compiled, factor, learns
    )
    return loss


@torch.no_grad()
def vocabulary_losses(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, compiled: bool = False
) -> Tensor:
    """Return the fp32 cross-entropy of each target, 0 without one; see `vocabulary_loss`."""
    chunk = chunk_tokens(len(targets_N), len(weight_VD), compiled=compiled)
    narrow_VD = weight_VD.to(product_dtype(hidden_ND))
    compute: Any = compiled_losses_of() if compiled else losses_of
    parts = zip(torch.split(hidden_ND, chunk), torch.split(targets_N, chunk), strict=True)
    return torch.cat(
        [
            compute(F.linear(hidden_CD.to(narrow_VD.dtype), narrow_VD), targets_C)
            for hidden_CD, targets_C in parts
        ]
    )


def loss_and_error(
    logits_CV: Tensor, targets_C: Tensor, *, wants_error: bool, factor: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of a chunk, and the gradient by the logits, times `factor`, in their
    dtype."""
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
    if factor is not None:
        error_CV = error_CV * factor
    return loss, error_CV.to(logits_CV.dtype).mul_(counted_C1)


@cache
def compiled_losses_of() -> Any:
    """Return `losses_of`, compiled when it is first called."""
    return torch.compile(losses_of, dynamic=False)


@cache
def compiled_loss_and_error() -> Any:
    """Return `loss_and_error`, compiled when it is first called."""
    return torch.compile(loss_and_error, dynamic=False)


def add_product(sum_VD: Tensor, left_VC: Tensor, right_CD: Tensor) -> None:
    """Add the product of two matrices to a sum in place. On a GPU of NVIDIA, one kernel adds in the
    fp32 of its accumulators: the product is neither rounded to half precision nor written."""
    if adds_in_fp32(sum_VD, left_VC):
        torch.addmm(sum_VD, left_VC, right_CD, out_dtype=torch.float32, out=sum_VD)
    else:
        sum_VD += left_VC @ right_CD


def adds_in_fp32(sum_VD: Tensor, left_VC: Tensor) -> bool:
    """Return whether torch adds products of half precision to an fp32 sum here."""
    is_narrow = left_VC.dtype in (torch.bfloat16, torch.float16) and sum_VD.dtype == torch.float32
    return is_narrow and sum_VD.is_cuda and _has_product(sum_VD.device, left_VC.dtype)


@cache
def _has_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device adds products of a dtype to an fp32 sum: tried once, on zeros."""
    narrow_88 = torch.zeros(8, 8, dtype=dtype, device=device)
    sum_88 = torch.zeros(8, 8, device=device)
    try:
        torch.addmm(sum_88, narrow_88, narrow_88, out_dtype=torch.float32, out=sum_88)
    except (TypeError, RuntimeError):  # an older torch, or a device without such a kernel
        return False
    return True


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        chunk: int,
        compiled: bool,
        factor: Tensor | None,
        learns: bool,
    ) -> Tensor:
        narrow_VD = weight_VD.to(product_dtype(hidden_ND))
        # An input needs a gradient even under `no_grad` if it is a weight.
        of_hidden, of_weight = (learns and needs for needs in ctx.needs_input_grad[:2])
        grad_ND = torch.empty_like(hidden_ND) if of_hidden else None
        grad_VD = torch.zeros_like(weight_VD) if of_weight else None
        loss = torch.zeros((), device=hidden_ND.device)
        compute: Any = compiled_loss_and_error() if compiled else loss_and_error
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            narrow_CD = hidden_ND[part].to(narrow_VD.dtype)
            summed, error_CV = compute(
                F.linear(narrow_CD, narrow_VD),
                targets_N[part],
                wants_error=of_hidden or of_weight,
                factor=factor,
            )
            loss = loss + summed
            if grad_ND is not None and grad_ND.dtype == narrow_VD.dtype:
                torch.mm(error_CV, narrow_VD, out=grad_ND[part])
            elif grad_ND is not None:
                grad_ND[part] = error_CV @ narrow_VD
            if grad_VD is not None:
                add_product(grad_VD, error_CV.t(), narrow_CD)
        ctx.save_for_backward(grad_ND, grad_VD)
        ctx.factor = factor
        return loss

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor | None, ...]:
        left = factors[0] if ctx.factor is None else factors[0] / ctx.factor
        grads = (None if grad is None else grad.mul_(left) for grad in ctx.saved_tensors)
        return (*grads, None, None, None, None, None)
