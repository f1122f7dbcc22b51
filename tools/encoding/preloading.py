"""Load the fast engine before the settings are known: mostly there is a tokenizer, and time."""

import contextlib

from tokenfeed.tools.encoding.engines import FastEngine
from tokenfeed.tools.encoding.tokenizer import fetch_tokenizer_json

__all__ = ["fast_engine", "preload"]

_loaded: list[FastEngine] = []


def preload(name: str, vocabulary_size: int, *, splits_special: bool) -> None:
    """Load an engine for `fast_engine` to find; if that fails, `fast_engine` will tell.

    Args:
        name: The tokenizer, as `--tokenizer` has it.
        vocabulary_size: As for `FastEngine`.
        splits_special: As for `FastEngine`.
    """
    if "://" in name:
        return  # what is forked from a process that has talked to a store could not talk to one
    with contextlib.suppress(Exception):
        json_bytes = fetch_tokenizer_json(name)
        _loaded.append(FastEngine(json_bytes, vocabulary_size, splits_special=splits_special))


def fast_engine(json_bytes: bytes, vocabulary_size: int, *, splits_special: bool) -> FastEngine:
    """The engine that was loaded for this tokenizer, or a new one; see `FastEngine`."""
    wanted = json_bytes, vocabulary_size, splits_special
    for engine in _loaded:
        if engine.made_of == wanted:
            return engine
    return FastEngine(json_bytes, vocabulary_size, splits_special=splits_special)
