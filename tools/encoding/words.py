"""Encode each distinct word once, for tokenizers in which words do not influence each other.

BERT's pre-tokenizer cuts a text at white space and at signs, and its normalizer changes no
character because of a character on the other side of such a cut. So the ids of a text are the ids
of its words. The reference encodes a word when it first appears; then its ids are looked up. Words
are cut at white space and signs of ASCII only. What else the tokenizer cuts at is inside a word.
"""

import itertools
import re
import string
from collections.abc import Callable
from typing import Self

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from tokenfeed.pipeline.arithmetic import Ragged, offsets_of, take
from tokenfeed.tools.encoding.routes import matches
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

__all__ = ["CACHE_BYTES", "Words"]

_COMPARED = ("0.21.", "0.22.", "0.23.")
"""Versions of `tokenizers` whose ids were compared."""
CACHE_BYTES = 128 << 20
"""Words are forgotten when they take about this much memory."""
_ARROW_BYTES = 1 << 31
_WORD_BYTES = 120
"""What a word takes beside its letters."""

_TYPES = (BertNormalizer, BertPreTokenizer, WordPiece)

_IS_BORDER = np.zeros(256, bool)
_IS_BORDER[np.frombuffer(f" \t\n\r{string.punctuation}".encode(), np.uint8)] = True

Encode = Callable[[list[bytes]], Ragged]
"""Encodes UTF-8 texts by the reference."""


class Words:
    """The ids of every word so far."""

    def __init__(self, tokenizer: TextTokenizer, encode: Encode, apart: str) -> None:
        self._tokenizer, self._encode = tokenizer.tokenizer, encode
        self._lowercase = bool(tokenizer.tokenizer.normalizer.lowercase)
        self._apart = apart
        """A regular expression of special tokens. Texts that have one are encoded whole."""
        self._numbers: dict[bytes, int] = {}
        self._ids = Ragged(np.empty(0, np.uint32), np.empty(0, np.int64))
        """By the word's number."""
        self._bytes = 0

    @classmethod
    def of_tokenizer(cls, tokenizer: TextTokenizer, encode: Encode) -> Self | None:
        """Return None for a tokenizer of another kind than BERT's.

        Args:
            tokenizer: Any.
            encode: Used for texts with special tokens and for words beyond ASCII.
        """
        inner = tokenizer.tokenizer
        added = inner.get_added_tokens_decoder().values()
        parts = zip((inner.normalizer, inner.pre_tokenizer, inner.model), _TYPES, strict=True)
        if (
            not tokenizers.__version__.startswith(_COMPARED)
            or not all(isinstance(part, kind) for part, kind in parts)
            or any(token.normalized or not token.special for token in added)
        ):
            return None
        contents = [re.escape(token.content) for token in added]
        return cls(tokenizer, encode, "|".join(contents) if tokenizer.splits_special else "")

    def encode(self, texts: list[bytes]) -> Ragged:
        """Encode UTF-8 texts; the ids are uint32."""
        if not self._apart:
            return self._encode_words(texts)
        is_apart = matches(self._apart, texts)
        order = np.argsort(is_apart, kind="stable")
        plain = self._encode_words([texts[place] for place in order if not is_apart[place]])
        whole = self._encode([texts[place] for place in order if is_apart[place]])
        made = Ragged(
            np.concatenate([plain.values, whole.values.astype(np.uint32)]),
            np.concatenate([plain.lengths, whole.lengths]),
        )
        return made.take(np.argsort(order))

    def _encode_words(self, texts: list[bytes]) -> Ragged:
        data = b"".join(texts)
        if not data or len(data) >= _ARROW_BYTES:
            return self._encode(texts)
        if self._bytes > CACHE_BYTES:
            self._numbers.clear()
            self._ids, self._bytes = Ragged(self._ids.values[:0], self._ids.lengths[:0]), 0
        ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
        is_border = _IS_BORDER[np.frombuffer(data, np.uint8)]
        is_cut = np.zeros(len(data) + 1, bool)
        is_cut[0] = is_cut[ends] = True
        is_cut[1:-1] |= is_border[1:] | is_border[:-1]
        cuts = np.flatnonzero(is_cut)
        buffers = [None, pa.py_buffer(cuts.astype(np.int32)), pa.py_buffer(data)]
        found = pa.Array.from_buffers(pa.binary(), len(cuts) - 1, buffers).dictionary_encode()
        numbers = self._numbers_of(found.dictionary.to_pylist())[found.indices.to_numpy()]
        sizes = offsets_of(self._ids.lengths[numbers])
        rows = sizes[np.searchsorted(cuts, ends)]
        values = take(self._ids.values, self._ids.offsets, numbers)
        return Ragged(values, np.diff(rows, prepend=0))

    def _numbers_of(self, words: list[bytes]) -> np.ndarray:
        """The numbers of some distinct words; new words are encoded first."""
        new = [word for word in words if word not in self._numbers]
        if new:
            plain = [word for word in new if word.isalnum()]  # of ASCII, as bytes
            others = [word for word in new if not word.isalnum()]
            made = [self._encode_plain(plain), self._encode(others)]
            first = len(self._numbers)
            self._bytes += sum(map(len, new)) + _WORD_BYTES * len(new)
            self._numbers.update(zip(plain + others, itertools.count(first), strict=False))
            values = [self._ids.values, *(part.values.astype(np.uint32) for part in made)]
            lengths = [self._ids.lengths, *(part.lengths for part in made)]
            self._ids = Ragged(np.concatenate(values), np.concatenate(lengths))
        return np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))

    def _encode_plain(self, words: list[bytes]) -> Ragged:
        """Encode letters and digits of ASCII, of which a normalizer could only change the case."""
        found = [(word.lower() if self._lowercase else word).decode() for word in words]
        ids = [[token.id for token in self._tokenizer.model.tokenize(word)] for word in found]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = itertools.chain.from_iterable(ids)
        return Ragged(np.fromiter(flat, np.uint32, int(lengths.sum())), lengths)
