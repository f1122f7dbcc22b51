"""Language modeling: predict the next token, or masked tokens.

`lm` (documents), `complete` (completions after prompts) and `chat` (conversations) predict the
token after each position. They differ only in which positions have a label: the loader sets none on
prompts and on what the assistant does not say.

`masked` fills gaps in documents, as BERT does. 15 % of the tokens with a label are targets. 80 % of
the targets are replaced by the mask token, 10 % by a random id, and 10 % stay. Special tokens,
padding and the first token of a document are never targets. The random draw depends only on the
seed and the number of the micro-batch, so a resumed run masks the same tokens. It runs on the
device, so the host does not wait.

Bits per byte are the loss of all targets in bits, divided by the bytes of text that the targets
stand for. Losses of different tokenizers can be compared by it. The end of a document is a target
of 0 bytes.
"""

import math
import re
from dataclasses import replace

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.pipeline.planning.order import derive_key
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.tasks.task import Task

_MASKS = ("[MASK]", "<mask>", "<|mask|>")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token of one byte, where characters that have no token are divided into bytes."""


def mask_id(tokenizer: Tokenizer) -> int | None:
    """Return the id of the mask token; None if the tokenizer has no mask token."""
    return next((id for id in map(tokenizer.token_to_id, _MASKS) if id is not None), None)


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
    causal = True
    packs = True
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


TARGET_SHARE, AS_MASK_SHARE, AT_RANDOM_SHARE = 0.15, 0.8, 0.1
_SPREADS = 8


class Masked(Task):
    """Predict masked tokens from the rest of their document.

    A tokenizer without a mask token gets one more id, which only this task uses.
    """

    name = "masked"
    kind = "vocabulary"
    causal = False
    packs = True

    def __init__(
        self, manifest: Manifest, seed: int, tokenizer: Tokenizer, device: torch.device
    ) -> None:
        super().__init__(manifest, seed)
        size, mask = manifest.tokenizer.vocabulary_size, mask_id(tokenizer)
        self._mask_id = size if mask is None else mask
        added = tokenizer.get_added_tokens_decoder()
        is_special = torch.zeros(size + 1, dtype=torch.bool)
        is_special[[*(id for id, token in added.items() if token.special), self._mask_id]] = True
        self._is_special = is_special.to(device)
        self._random = torch.Generator(device)

    @property
    def vocabulary_size(self) -> int:
        """Number of ids of the tokenizer, plus one if the mask token is not among them."""
        return max(self.manifest.tokenizer.vocabulary_size, self._mask_id + 1)

    def prepare(self, micro_batch: MicroBatch, number: int) -> MicroBatch:
        """Hide some tokens, and make them the only targets."""
        ids_BT, labels_BT = micro_batch.ids_BT, micro_batch.targets
        share_BT, as_what_BT, random_BT = self._draw(ids_BT, number)
        may_BT = (labels_BT != IGNORED) & ~self._is_special[ids_BT]
        target_BT = may_BT & (share_BT < TARGET_SHARE)
        as_mask_BT = target_BT & (as_what_BT < AS_MASK_SHARE)
        at_random_BT = target_BT & (as_what_BT >= 1 - AT_RANDOM_SHARE)
        shown_BT = torch.where(as_mask_BT, self._mask_id, ids_BT)
        return replace(
            micro_batch,
            ids_BT=torch.where(at_random_BT, random_BT, shown_BT),
            targets=torch.where(target_BT, labels_BT, IGNORED),
        )

    def most_targets(self, slots: int) -> int:
        """Return a number of targets that random draws exceed less than once in 10**12
        micro-batches. In that case, the last targets are left out."""
        spread = math.sqrt(slots * TARGET_SHARE * (1 - TARGET_SHARE))
        return min(slots, math.ceil(slots * TARGET_SHARE + _SPREADS * (spread + 1)))

    def _draw(self, ids_BT: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return two numbers in [0, 1) and an id for each slot."""
        self._random.manual_seed(derive_key(self.seed, number))
        device, shape = ids_BT.device, ids_BT.shape
        chances_2BT = torch.rand((2, *shape), generator=self._random, device=device)
        size = self.manifest.tokenizer.vocabulary_size
        random_BT = torch.randint(0, size, shape, generator=self._random, device=device)
        return chances_2BT[0], chances_2BT[1], random_BT
