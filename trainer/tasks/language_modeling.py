"""Language modeling: predict the next token.

`lm` (documents), `complete` (completions after prompts) and `chat` (conversations) predict the
token after each position. They differ only in which positions have a label: the loader sets none on
prompts and on what the assistant does not say.

Bits per byte are the loss of all targets in bits, divided by the bytes of text that the targets
stand for. Losses of different tokenizers can be compared by it. The end of a document is a target
of 0 bytes.
"""

import re
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.tasks.task import Loss, Task
from tokenfeed.trainer.tasks.vocabulary_loss import (
    is_large,
    vocabulary_loss,
    vocabulary_losses,
)

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
        if not self._is_chunked(model, micro_batch):
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

    def _is_chunked(self, model: Any, micro_batch: MicroBatch) -> bool:
        """Return whether the logits should be computed in chunks, and can be."""
        return has_hidden(model) and is_large(micro_batch.num_slots, len(model.head_weight))

    def losses(self, model: Any, micro_batch: MicroBatch) -> Tensor:
        """Return the cross-entropy of each target, 0 without one. Large logits are computed in
        chunks."""
        if not self._is_chunked(model, micro_batch):
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
