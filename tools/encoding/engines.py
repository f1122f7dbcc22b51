"""Engines turn texts into ids. `tokenizers` is the reference; `gigatoken` is fast.

An engine takes a batch of UTF-8 texts, and returns flat ids and lengths as numpy arrays in storage
dtype. No token becomes a Python object. The fast engine is used only if tests compared the engines
for the shape of the tokenizer and the installed versions. `audit` also compares them in each run.
"""

import contextlib
import functools
import itertools
from typing import Literal

import numpy as np

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.pipeline.format.data_set import NOT_FAILURES
from tokenfeed.pipeline.format.schema import token_dtype
from tokenfeed.tools.encoding.fast.engine import (
    EngineUnavailable,
    FastEngine,
    supported_shape,
)
from tokenfeed.tools.encoding.fast.words import Words
from tokenfeed.tools.encoding.tokenizer import TextTokenizer, fetch_tokenizer_json

EngineName = Literal["tokenizers", "gigatoken"]
"""The packages that can make ids."""


class Unencodable(Exception):
    """The tokenizer cannot encode a text. The message says why."""


class ReferenceEngine:
    """The `tokenizers` package. Its ids are correct by definition."""

    name: EngineName = "tokenizers"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer.tokenizer
        self._dtype = token_dtype(tokenizer.vocabulary_size)
        self._words = Words.of_tokenizer(
            tokenizer.tokenizer, self._encode_whole, splits_special=tokenizer.splits_special
        )

    def encode(self, texts: list[bytes]) -> Ragged:
        """Encode UTF-8 texts.

        Returns:
            The ids of each text, uint16 or uint32. A text may have no ids.

        Raises:
            Unencodable: One of the texts cannot be encoded.
        """
        if self._words is not None:
            try:
                made = self._words.encode(texts)
            except NOT_FAILURES:
                raise
            except Exception:  # of the library, about a word: below, the text is named
                return self._encode_whole(texts)
            return Ragged(made.values.astype(self._dtype), made.lengths)
        return self._encode_whole(texts)

    def _encode_whole(self, texts: list[bytes]) -> Ragged:
        decoded = [text.decode() for text in texts]
        try:
            encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        except BaseException as error:  # the library raises what its Rust side gives, panics too
            if isinstance(error, NOT_FAILURES):
                raise
            self._raise_of_one(decoded)
            raise TokenizerError(f"the tokenizer fails over a batch of texts: {error}") from None
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        flat = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
        return Ragged(np.fromiter(flat, self._dtype, int(lengths.sum())), lengths)

    def _raise_of_one(self, texts: list[str]) -> None:
        """Raise `Unencodable` for the first text that cannot be encoded alone."""
        for text in texts:
            try:
                self._tokenizer.encode(text, add_special_tokens=False)
            except BaseException as error:
                if isinstance(error, NOT_FAILURES):
                    raise
                raise Unencodable(f"the tokenizer cannot encode it: {error}") from None


Engine = ReferenceEngine | FastEngine


def check_fast(tokenizer: TextTokenizer) -> None:
    """See `FastEngine.check`."""
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    contents = {id_: token.content for id_, token in added.items()}
    FastEngine.check(tokenizer.json_bytes, contents)


def fast_engine(tokenizer: TextTokenizer) -> FastEngine:
    """Load the fast engine for a tokenizer that is already loaded, and check its vocabulary.

    Raises:
        EngineUnavailable: The engine is not installed, or cannot be used for this tokenizer.
    """
    check_fast(tokenizer)
    return FastEngine(
        tokenizer.json_bytes,
        tokenizer.vocabulary_size,
        splits_special=tokenizer.splits_special,
        reference=ReferenceEngine(tokenizer).encode,
    )


_loaded: list[tuple[tuple[bytes, bool], Engine]] = []
"""Each engine, with the tokenizer.json and `splits_special`."""


def preload(name: str, vocabulary_size: int, *, splits_special: bool) -> None:
    """Load an engine that `load_engine` will return: the fast one, if it knows the tokenizer.

    If this fails, `load_engine` raises the error.

    Args:
        name: The value of `--tokenizer`.
        vocabulary_size: See `FastEngine`.
        splits_special: See `FastEngine`.
    """
    if "://" in name:
        return  # what is forked from a process that has talked to a store could not talk to one
    with contextlib.suppress(Exception):
        json_bytes = fetch_tokenizer_json(name)
        try:
            supported_shape(json_bytes)
            kind: EngineName = FastEngine.name
        except EngineUnavailable:
            kind = ReferenceEngine.name
        engine = load_engine(kind, json_bytes, vocabulary_size, splits_special=splits_special)
        _loaded.append(((json_bytes, splits_special), engine))


def load_engine(
    name: EngineName, json_bytes: bytes, vocabulary_size: int, *, splits_special: bool
) -> Engine:
    """Return the engine that `preload` loaded for this tokenizer, or a new engine.

    Raises:
        EngineUnavailable: The fast engine is wanted, but cannot be used for this tokenizer.
    """
    for made_of, engine in _loaded:
        if made_of == (json_bytes, splits_special) and engine.name == name:
            return engine

    @functools.cache
    def reference() -> ReferenceEngine:
        return ReferenceEngine(
            TextTokenizer.load(json_bytes, origin="the tokenizer", splits_special=splits_special)
        )

    if name == ReferenceEngine.name:
        return reference()
    return FastEngine(
        json_bytes,
        vocabulary_size,
        splits_special=splits_special,
        reference=lambda texts: reference().encode(texts),  # loaded for the first of them
    )
