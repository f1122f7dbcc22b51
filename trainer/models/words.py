"""Words: tokens whose texts differ in case, or in the space around them, alone.

A tokenizer that keeps both has " happy", "happy" and "Happy" apart, and of few rows a model would
learn each by itself.
"""

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.trainer.data_sets import read_tokenizer

__all__ = ["words_of"]

_BROKEN = "\ufffd"
"""In the text of a token that is a part of a character's bytes."""


def words_of(shards: StorePath) -> Tensor:
    """(V,): for each id the least id of the same word; what has no text of its own stays.

    Raises:
        ConfigError: The tokenizer of the shards cannot be read.
    """
    ids = list(range(Manifest.read(shards).tokenizer.vocabulary_size))
    tokenizer = _read(shards)
    texts = tokenizer.decode_batch([[id] for id in ids], skip_special_tokens=False)
    first: dict[str, int] = {}
    words = [_fold(text) for text in texts]
    return torch.tensor(
        [first.setdefault(w, id) if w else id for id, w in zip(ids, words, strict=True)]
    )


def _fold(text: str) -> str:
    return "" if _BROKEN in text else text.strip().casefold()


def _read(shards: StorePath) -> Tokenizer:
    content = read_tokenizer(shards)
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # `tokenizers` raises nothing more exact
        raise ConfigError(
            f"{shards}: its tokenizer cannot be read ({error}). Give another --model, which needs "
            "none."
        ) from error
