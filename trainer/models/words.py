"""Words: tokens whose texts differ in case, or in the space around them, alone.

A tokenizer that keeps both has " happy", "happy" and "Happy" apart, and of few rows a model would
learn each by itself.
"""

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.once import read_once
from tokenfeed.pipeline.format.store import StorePath, open_store

__all__ = ["words_of"]

_BROKEN = "\ufffd"
"""In the text of a token that is a part of a character's bytes."""


def words_of(shards: StorePath) -> Tensor:
    """(V,): for each id the least id of the same word; what has no text of its own stays.

    Raises:
        ConfigError: The tokenizer of the shards cannot be read.
    """
    tokens = Manifest.read(shards).tokenizer
    ids = list(range(tokens.vocabulary_size))
    tokenizer = _read(shards, tokens.file)
    texts = tokenizer.decode_batch([[id] for id in ids], skip_special_tokens=False)
    first: dict[str, int] = {}
    words = [_fold(text) for text in texts]
    return torch.tensor(
        [first.setdefault(w, id) if w else id for id, w in zip(ids, words, strict=True)]
    )


def _fold(text: str) -> str:
    return "" if _BROKEN in text else text.strip().casefold()


def _read(shards: StorePath, file: str) -> Tokenizer:
    store = open_store(shards)
    try:
        return Tokenizer.from_buffer(read_once(store, file))
    except Exception as error:  # `tokenizers` raises nothing more exact
        raise ConfigError(
            f"{store.path(file)}: cannot be read ({error}). Take it from another copy of the data "
            "set, or give another --model, which needs none."
        ) from error
