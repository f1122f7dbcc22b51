"""Special tokens of a data set's tokenizer: [CLS], [SEP], <mask> and their like.

Torch-free: reads the tokenizer.json beside the shards.
"""

import json
from dataclasses import dataclass

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.trainer.data_sets import read_tokenizer

__all__ = ["SpecialIds"]

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
