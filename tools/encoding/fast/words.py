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
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from tokenfeed.pipeline.arithmetic import Ragged, offsets_of, ranges
from tokenfeed.tools.encoding.fast.routes import matches
from tokenfeed.tools.encoding.fast.shapes import COMPARED_TOKENIZERS

Encode = Callable[[list[bytes]], Ragged]
"""Encodes UTF-8 texts or words."""
_WORD_BYTES = 120
"""What a word takes beside its letters."""


CACHE_BYTES = 128 << 20
"""Words are forgotten when they take about this much memory."""
_ARROW_BYTES = 1 << 31

_TYPES = (BertNormalizer, BertPreTokenizer, WordPiece)

_SPACES = b" \t\n\r"
_SIGN, _SPACE = 1, 2
_KINDS = bytes(
    _SPACE if byte in _SPACES else _SIGN if chr(byte) in string.punctuation else 0
    for byte in range(256)
)
"""The kind of each byte: white space, a sign of ASCII, or 0."""


class Words:
    """The ids of words, by their bytes: a word has the same ids wherever it stands."""

    def __init__(self, tokenizer: Tokenizer, encode: Encode, apart: str) -> None:
        self._tokenizer, self._encode = tokenizer, encode
        self._apart = apart
        """A regular expression of special tokens. Texts that have one are encoded whole."""
        self._forget()

    def _forget(self) -> None:
        self._num_bytes = 0
        """About the memory that the words take."""
        self._numbers: dict[bytes, int] = {}
        self._ids, self._offsets = np.empty(0, np.uint32), np.zeros(1, np.int64)
        """All ids, and where those of each number begin."""

    @classmethod
    def of_tokenizer(
        cls, tokenizer: Tokenizer, encode: Encode, *, splits_special: bool
    ) -> Self | None:
        """Return the cache for a tokenizer; None if its words cannot be encoded alone.

        Args:
            tokenizer: Any.
            encode: Used for texts with special tokens and for words beyond ASCII.
            splits_special: Whether special tokens in a text become their ids.
        """
        added = tokenizer.get_added_tokens_decoder().values()
        parts = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.model
        if (
            not tokenizers.__version__.startswith(COMPARED_TOKENIZERS)
            or not all(map(isinstance, parts, _TYPES))
            or any(token.normalized or not token.special for token in added)
        ):
            return None
        contents = [re.escape(token.content) for token in added]
        return cls(tokenizer, encode, "|".join(contents) if splits_special else "")

    def encode(self, texts: list[bytes]) -> Ragged:
        """Encode UTF-8 texts; the ids are uint32."""
        if not self._apart:
            return self._encode_words(texts)
        is_apart = matches(self._apart, texts)
        plain = self._encode_words([*itertools.compress(texts, ~is_apart)])
        return woven(is_apart, self._encode([*itertools.compress(texts, is_apart)]), plain)

    def _encode_words(self, texts: list[bytes]) -> Ragged:
        if not 0 < sum(map(len, texts)) < _ARROW_BYTES:
            return self._encode(texts)
        if self._num_bytes > CACHE_BYTES:
            self._forget()
        data, ends, words = self._cut(texts)
        numbers = self._find(data, words)
        starts = self._offsets[numbers]
        lengths = self._offsets[numbers + 1] - starts
        of_rows = np.diff(offsets_of(lengths)[np.searchsorted(words, ends)], prepend=0)
        # Most words have one or two ids: then, an index per id is faster than `take`.
        return Ragged(self._ids[ranges(starts, lengths)], of_rows)

    def _find(self, data: np.ndarray, cuts: np.ndarray) -> np.ndarray:
        """Return the number of each word, shape (W,). Encode words that were never found before.

        Args:
            data: All words, uint8.
            cuts: Where each word begins, and the end, shape (W + 1,).
        """
        buffers = [None, pa.py_buffer(cuts.astype(np.int32)), pa.py_buffer(data)]
        found = pa.Array.from_buffers(pa.binary(), len(cuts) - 1, buffers).dictionary_encode()
        words = found.dictionary.to_pylist()
        known = map(self._numbers.get, words, itertools.repeat(-1))
        numbers = np.fromiter(known, np.int64, len(words))
        is_new = numbers < 0
        if is_new.any():
            new = [*itertools.compress(words, is_new)]
            made = self._encode_new(new)
            first = len(self._numbers)
            self._numbers.update(zip(new, itertools.count(first), strict=False))
            numbers[is_new] = np.arange(first, first + len(new))
            self._ids = np.concatenate([self._ids, made.values.astype(np.uint32)])
            self._offsets = np.append(self._offsets, self._offsets[-1] + np.cumsum(made.lengths))
            self._num_bytes += sum(map(len, new)) + _WORD_BYTES * len(new)
        # `to_numpy` would import pandas.
        indexes = np.frombuffer(found.indices.buffers()[1] or b"", np.int32)
        of_words: np.ndarray = numbers[indexes]
        return of_words

    def _cut(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cut texts into words. Leave out white space, which has no ids.

        Returns:
            Bytes with the ids of all texts, uint8, the end of each text therein, and where each
            word begins, with the end of the last one.
        """
        joined = b"".join(texts)
        ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
        kinds = np.frombuffer(joined.translate(_KINDS), np.uint8)
        is_cut, is_border = np.ones(len(joined) + 1, bool), kinds > 0
        is_cut[1:-1] = is_border[1:] | is_border[:-1]
        is_cut[ends] = True
        # `translate` deletes bytes faster than numpy.
        is_start = (is_cut[:-1] | kinds & _SPACE).tobytes().translate(None, bytes([2, 3])) + b"\1"
        ends -= np.searchsorted(np.flatnonzero(kinds == _SPACE), ends)
        data = np.frombuffer(joined.translate(None, _SPACES), np.uint8)
        return data, ends, np.flatnonzero(np.frombuffer(is_start, bool))

    def _encode_new(self, words: list[bytes]) -> Ragged:
        """Encode words that are not in the cache."""
        is_plain = np.fromiter(map(bytes.isalnum, words), bool, len(words))  # of ASCII, as bytes
        plain = self._encode_plain([*itertools.compress(words, is_plain)])
        return woven(is_plain, plain, self._encode([*itertools.compress(words, ~is_plain)]))

    def _encode_plain(self, words: list[bytes]) -> Ragged:
        """Encode letters and digits of ASCII, of which a normalizer could only change the case."""
        lowercase = bool(self._tokenizer.normalizer.lowercase)
        found = [(word.lower() if lowercase else word).decode() for word in words]
        ids = [[token.id for token in self._tokenizer.model.tokenize(word)] for word in found]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = itertools.chain.from_iterable(ids)
        return Ragged(np.fromiter(flat, np.uint32, int(lengths.sum())), lengths)


def woven(is_first: np.ndarray, first: Ragged, second: Ragged) -> Ragged:
    """Return the rows of two in one order: a row of `first` for each True, or else of `second`."""
    made = Ragged(
        np.concatenate([first.values, second.values]),
        np.concatenate([first.lengths, second.lengths]),
    )
    return made.take(np.argsort(np.argsort(~is_first, kind="stable")))
