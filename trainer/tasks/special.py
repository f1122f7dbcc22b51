"""Special tokens of a data set's tokenizer: [CLS], [SEP], <mask> and their like.

Torch-free: reads the tokenizer.json beside the shards.
"""

import json
from dataclasses import dataclass

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.once import read_once
from tokenfeed.pipeline.format.store import StorePath, open_store

__all__ = ["SpecialIds"]

_MASKS = ("[MASK]", "<mask>", "<|mask|>")


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids that stand for no text."""

    all: tuple[int, ...]
    mask: int | None
    """What stands for a hidden token; None where the tokenizer knows none."""

    @classmethod
    def from_shards(cls, shards: StorePath, manifest: Manifest) -> "SpecialIds":
        """Those of the tokenizer that made the shards.

        Raises:
            ConfigError: Its file is not there, or is no tokenizer.
        """
        store, file = open_store(shards), manifest.tokenizer.file
        try:
            added = json.loads(read_once(store, file)).get("added_tokens") or []
            ids = {entry["content"]: int(entry["id"]) for entry in added if entry["special"]}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{store.path(file)}: cannot be read ({error}). Take it from another copy of the "
                "data set, or run `pretokenize` again."
            ) from error
        masks = [ids[text] for text in _MASKS if text in ids]
        return cls(tuple(ids.values()), masks[0] if masks else None)
