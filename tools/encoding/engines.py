"""Engines turn texts into ids. `tokenizers` is the reference; `gigatoken` is fast.

An engine takes a batch of UTF-8 texts, and returns flat ids and lengths as numpy arrays in storage
dtype. No token becomes a Python object. The fast engine is used only if tests compared the engines
for the shape of the tokenizer and the installed versions. `audit` also compares them in each run.
"""

import contextlib
import itertools
from typing import Literal, Self

import numpy as np

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.pipeline.format.data_set import NOT_FAILURES
from tokenfeed.pipeline.format.schema import token_dtype
from tokenfeed.tools.encoding.fast.engine import (
    EngineUnavailable,
    FastEncoder,
    supported_shape,
)
from tokenfeed.tools.encoding.fast.words import Words
from tokenfeed.tools.encoding.tokenizer import TextTokenizer, fetch_tokenizer_json

EngineName = Literal["tokenizers", "gigatoken"]


class Unencodable(Exception):
    """Texts that the tokenizer cannot encode."""

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons
        """The reason, by the index of the text in the batch."""


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
            Unencodable: Some of the texts cannot be encoded.
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
            if reasons := self._reasons(decoded):
                raise Unencodable(reasons) from None
            raise TokenizerError(f"the tokenizer fails over a batch of texts: {error}") from None
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        flat = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
        return Ragged(np.fromiter(flat, self._dtype, int(lengths.sum())), lengths)

    def _reasons(self, texts: list[str]) -> dict[int, str]:
        reasons = {}
        for index, text in enumerate(texts):
            try:
                self._tokenizer.encode(text, add_special_tokens=False)
            except BaseException as error:
                if isinstance(error, NOT_FAILURES):
                    raise
                reasons[index] = f"the tokenizer cannot encode it: {error}"
        return reasons


class FastEngine:
    """The fast encoder, and the reference for the texts that only the reference may encode. The
    reference is loaded for the first of these texts."""

    name: EngineName = "gigatoken"

    def __init__(self, json_bytes: bytes, vocabulary_size: int, *, splits_special: bool) -> None:
        """Load the fast encoder without the reference; see `FastEncoder`.

        Raises:
            EngineUnavailable: It is not installed, or cannot be used for this tokenizer.
        """
        self.fast = FastEncoder(json_bytes, vocabulary_size, splits_special=splits_special)
        self.reference: ReferenceEngine | None = None
        self.routed = 0
        """Number of texts of the last batch that the reference encoded."""
        self._json, self._splits_special = json_bytes, splits_special

    @classmethod
    def from_tokenizer(cls, tokenizer: TextTokenizer) -> Self:
        """Load the fast engine for a tokenizer that is already loaded, and check its vocabulary.

        Raises:
            EngineUnavailable: The engine is not installed, or cannot be used for this tokenizer.
        """
        cls.check(tokenizer)
        made = cls(
            tokenizer.json_bytes,
            tokenizer.vocabulary_size,
            splits_special=tokenizer.splits_special,
        )
        made.reference = ReferenceEngine(tokenizer)
        return made

    @staticmethod
    def check(tokenizer: TextTokenizer) -> None:
        """See `FastEncoder.check`."""
        added = tokenizer.tokenizer.get_added_tokens_decoder()
        contents = {id_: token.content for id_, token in added.items()}
        FastEncoder.check(tokenizer.json_bytes, contents)

    def encode(self, texts: list[bytes]) -> Ragged:
        """Encode UTF-8 texts like `ReferenceEngine.encode`.

        Raises:
            Unencodable: The reference cannot encode some of the texts.
            EngineFailure: The fast engine failed.
        """
        routed = self.fast.routed(texts)
        self.routed = len(routed)
        if not self.routed:
            return self.fast.encode(texts)
        others = np.setdiff1d(np.arange(len(texts)), routed)
        parts = (
            self.fast.encode([texts[place] for place in others]),
            self._encode_routed(texts, routed),
        )
        made = Ragged(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        )
        return made.take(np.argsort(np.concatenate([others, routed])))

    def _encode_routed(self, texts: list[bytes], routed: np.ndarray) -> Ragged:
        """Encode the texts with the indexes `routed` by the reference."""
        if self.reference is None:
            tokenizer = TextTokenizer.load(
                self._json, origin="the tokenizer", splits_special=self._splits_special
            )
            self.reference = ReferenceEngine(tokenizer)
        try:
            return self.reference.encode([texts[place] for place in routed])
        except Unencodable as error:
            reasons = {int(routed[place]): reason for place, reason in error.reasons.items()}
            raise Unencodable(reasons) from None


class NoEngine:
    """Stands for the reference if a task encodes no text. It takes no time to load."""

    name: EngineName = ReferenceEngine.name

    def encode(self, texts: list[bytes]) -> Ragged:
        """Encode nothing."""
        raise AssertionError("the task has no texts")


Engine = ReferenceEngine | FastEngine | NoEngine


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
    if name == FastEngine.name:
        return FastEngine(json_bytes, vocabulary_size, splits_special=splits_special)
    tokenizer = TextTokenizer.load(
        json_bytes, origin="the tokenizer", splits_special=splits_special
    )
    return ReferenceEngine(tokenizer)
