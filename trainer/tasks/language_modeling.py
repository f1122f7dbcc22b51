"""Language modeling: predict the next token, or masked tokens.

`lm` (documents) and `complete` (completions after prompts) predict the token after each position.
They differ only in which positions have a label; the loader gives prompts none.

`masked` fills gaps in documents, as BERT does. 15 % of the tokens with a label are targets. 80 % of
the targets are replaced by the mask token, 10 % by a random id, and 10 % stay. Special tokens,
padding and the first token of a document are never targets. The draw is a function of the seed and
the number of the micro-batch, and runs on the device: a resumed run masks the same tokens, and the
host does not wait.
"""

import json
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.pipeline.planning.order import derive_key
from tokenfeed.trainer.data.datasets import read_tokenizer
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.tasks.task import Task

__all__ = ["Completion", "LanguageModelling", "Masked", "SpecialIds", "perplexity"]

_MASKS = ("[MASK]", "<mask>", "<|mask|>")


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids that stand for no text."""

    all: tuple[int, ...]
    mask: int | None
    """What stands for a hidden token; None where the tokenizer knows none."""

    @classmethod
    def from_shards(cls, shards: StorePath) -> "SpecialIds":
        """Those of the tokenizer that made the shards.

        Raises:
            ConfigError: Its file cannot be read, or is no tokenizer.
        """
        content = read_tokenizer(shards)
        try:
            added = json.loads(content).get("added_tokens") or []
            ids = {entry["content"]: int(entry["id"]) for entry in added if entry["special"]}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{shards}: its tokenizer is not understood ({error}).") from error
        masks = [ids[text] for text in _MASKS if text in ids]
        return cls(tuple(ids.values()), masks[0] if masks else None)


_LARGEST_EXPONENT = 700.0  # of a float


class LanguageModelling(Task):
    """Each token given those before it; in a packed row also those of other documents, which costs
    no quality and saves a mask."""

    name = "lm"
    kind = "vocabulary"
    causal = True
    packs = True
    apart = False

    def targets(self, labels: Tensor) -> Tensor:
        """The label behind each position.

        Shifting the labels copies 8 bytes a token; shifting the logits would copy V floats.
        """
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED)

    def of_loss(self, loss: float) -> dict[str, float]:
        """Perplexity."""
        return perplexity(loss)


class Completion(LanguageModelling):
    """Each token of a completion given its prompt and those before it, and nothing else."""

    name = "complete"
    apart = True


def perplexity(loss: float) -> dict[str, float]:
    """The number of equally likely choices that would have this loss."""
    return {"perplexity": math.exp(min(loss, _LARGEST_EXPONENT))}


TARGET_SHARE, AS_MASK_SHARE, AT_RANDOM_SHARE = 0.15, 0.8, 0.1
_SPREADS = 8


class Masked(Task):
    """Each masked token given all others of its document."""

    name = "masked"
    kind = "vocabulary"
    causal = False
    packs = True

    def __init__(
        self, manifest: Manifest, seed: int, special: SpecialIds, device: torch.device
    ) -> None:
        """A tokenizer without a mask token gets one more id, which only this task uses."""
        super().__init__(manifest, seed)
        size = manifest.tokenizer.vocabulary_size
        self._mask_id = size if special.mask is None else special.mask
        is_special = torch.zeros(size + 1, dtype=torch.bool)
        is_special[[*special.all, self._mask_id]] = True
        self._is_special = is_special.to(device)
        self._random = torch.Generator(device)

    @property
    def vocabulary_size(self) -> int:
        """Those of the tokenizer, and the mask token's."""
        return max(self.manifest.tokenizer.vocabulary_size, self._mask_id + 1)

    def prepare(self, micro_batch: MicroBatch, number: int) -> MicroBatch:
        """Hide some tokens, and make them the only targets."""
        ids_BT, labels_BT = micro_batch.ids_BT, micro_batch.labels
        share_BT, as_what_BT, random_BT = self._draw(ids_BT, number)
        may_BT = (labels_BT != IGNORED) & ~self._is_special[ids_BT]
        target_BT = may_BT & (share_BT < TARGET_SHARE)
        as_mask_BT = target_BT & (as_what_BT < AS_MASK_SHARE)
        at_random_BT = target_BT & (as_what_BT >= 1 - AT_RANDOM_SHARE)
        shown_BT = torch.where(as_mask_BT, self._mask_id, ids_BT)
        return replace(
            micro_batch,
            ids_BT=torch.where(at_random_BT, random_BT, shown_BT),
            labels=torch.where(target_BT, labels_BT, IGNORED),
        )

    def most_targets(self, slots: int) -> int:
        """More are drawn less than once in 10**12 micro-batches; then the last of them are left
        out."""
        spread = math.sqrt(slots * TARGET_SHARE * (1 - TARGET_SHARE))
        return min(slots, math.ceil(slots * TARGET_SHARE + _SPREADS * (spread + 1)))

    def of_loss(self, loss: float) -> dict[str, float]:
        """Perplexity of the masked tokens."""
        return perplexity(loss)

    def _draw(self, ids_BT: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """For each slot two numbers in [0, 1) and an id."""
        self._random.manual_seed(derive_key(self.seed, number))
        device, shape = ids_BT.device, ids_BT.shape
        chances_2BT = torch.rand((2, *shape), generator=self._random, device=device)
        size = self.manifest.tokenizer.vocabulary_size
        random_BT = torch.randint(0, size, shape, generator=self._random, device=device)
        return chances_2BT[0], chances_2BT[1], random_BT
