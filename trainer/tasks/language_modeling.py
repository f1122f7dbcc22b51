"""Language modeling: predict the next token.

`lm` (documents), `complete` (completions after prompts) and `chat` (conversations) predict the
token after each position. They differ only in which positions have a label: the loader sets none on
prompts and on what the assistant does not say.

Bits per byte are the loss of all targets in bits, divided by the bytes of text that the targets
stand for. Losses of different tokenizers can be compared by it. The end of a document is a target
of 0 bytes.
"""

import re

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.tasks.task import Task

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
