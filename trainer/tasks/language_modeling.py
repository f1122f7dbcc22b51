"""Language modeling: predict the next token.

`lm` (documents), `complete` (completions after prompts) and `chat` (conversations) predict the
token after each position. They differ only in which positions have a label: the loader sets none on
prompts and on what the assistant does not say.

Bits per byte are the loss of all targets in bits, divided by the bytes of text that the targets
stand for. Losses of different tokenizers can be compared by it. The end of a document is a target
of 0 bytes.

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

import re
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.trainer.data.attention import product_dtype
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.tasks.task import Loss, Task, losses_of

_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token of one byte, where characters that have no token are divided into bytes."""


def token_bytes(tokenizer: Tokenizer) -> Tensor:
    """Return the bytes of text of each id; 0 for special tokens.

    In a byte-level tokenizer, each character of a token is a byte. In others, a token has the bytes
    that it adds to the text of a token before it. Spaces that a tokenizer drops are not counted.
    """
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
    sizes = torch.zeros(max(vocabulary.values(), default=-1) + 1, dtype=torch.int64)
    if "ByteLevel" in str(tokenizer.decoder):
        for token, id in vocabulary.items():
            sizes[id] = len(token)
    else:
        first = min(vocabulary.values() - added.keys(), default=0)
        alone = len(tokenizer.decode([first]).encode())
        for token, id in vocabulary.items():
            both = len(tokenizer.decode([first, id]).encode())
            sizes[id] = 1 if _BYTE.fullmatch(token) else both - alone
    for id, entry in added.items():
        sizes[id] = 0 if entry.special else len(entry.content.encode())
    return sizes


class LanguageModelling(Task):
    """Predict each token from the tokens before it.

    In a packed row, these include tokens of other documents. This needs no mask, and does not
    reduce quality.
    """

    name = "lm"
    kind = "vocabulary"
    apart = False

    bytes_of_token: Tensor | None = None
    """Bytes of text of each id; None if the tokenizer cannot be read."""

    def loss(self, model: Any, micro_batch: MicroBatch) -> Loss:
        """Return the cross-entropy summed over targets.

        If the logits would be large, and the model offers the input of its head, the logits are
        computed in chunks.
        """
        if not _is_large(model, micro_batch):
            return super().loss(model, micro_batch)
        hidden_ND = model.hidden(micro_batch).flatten(0, 1)
        targets_N = micro_batch.targets.flatten()
        summed = vocabulary_loss(
            hidden_ND,
            model.head_weight,
            targets_N,
            compiled=self.is_compiled,
            factor=self.factor,
        )
        return Loss(summed, (targets_N != IGNORED).sum())

    def losses(self, model: Any, micro_batch: MicroBatch) -> Tensor:
        """Return the cross-entropy of each target, 0 without one. Large logits are computed in
        chunks."""
        if not _is_large(model, micro_batch):
            return super().losses(model, micro_batch)
        targets = micro_batch.targets
        return vocabulary_losses(
            model.hidden(micro_batch).flatten(0, 1),
            model.head_weight,
            targets.flatten(),
            compiled=self.is_compiled,
        ).view_as(targets)

    def bytes_of_targets(self, micro_batch: MicroBatch) -> Tensor | int:
        """Return the bytes of text that the targets stand for."""
        if self.bytes_of_token is None:
            return 0
        targets_BT = micro_batch.targets
        bytes_BT = self.bytes_of_token.take(targets_BT.clamp(min=0))
        return (bytes_BT * (targets_BT != IGNORED)).sum()


class Completion(LanguageModelling):
    """Predict each token of a completion from its prompt and the tokens before it."""

    name = "complete"
    apart = True


class Chat(Completion):
    """Predict the tokens of conversations that --targets selects."""

    name = "chat"


def has_hidden(model: nn.Module) -> bool:
    """Return whether a model offers the input of its head, so that the loss needs no logits.

    Such a model has `hidden(micro_batch)`, the head's input of shape (B, T, D), and `head_weight`,
    the head's parameter of shape (V, D). Its logits equal `hidden @ head_weight.T`, with nothing
    added. Without `head_weight`, a model offers only logits.
    """
    return getattr(model, "head_weight", None) is not None


def _is_large(model: Any, micro_batch: MicroBatch) -> bool:
    """Return whether the logits of a micro-batch should be computed in chunks, and can be."""
    return has_hidden(model) and (
        micro_batch.num_slots * len(model.head_weight) * _BYTES_PER_LOGIT > WORTH_BYTES
    )


_BYTES_PER_LOGIT, _COMPILED_BYTES_PER_LOGIT = 10, 4
"""Memory of a chunk: logits in half precision, in fp32, and their log-softmax. With `--compile`:
logits and their gradient in half precision."""
_CHUNK_BYTES, _COMPILED_CHUNK_BYTES, WORTH_BYTES = 1 << 30, 1 << 31, 1 << 26
MOST_TOKENS = 8192
"""Tokens of the largest chunk."""


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
                grad_VD += error_CV.t() @ narrow_CD
        ctx.save_for_backward(grad_ND, grad_VD)
        ctx.factor = factor
        return loss

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor | None, ...]:
        left = factors[0] if ctx.factor is None else factors[0] / ctx.factor
        grads = (None if grad is None else grad.mul_(left) for grad in ctx.saved_tensors)
        return (*grads, None, None, None, None, None)
