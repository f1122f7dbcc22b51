"""Encode each distinct word once, for tokenizers in which words do not influence each other.

BERT's pre-tokenizer cuts a text at white space and at signs, and its normalizer changes no
character because of a character on the other side of such a cut. So the ids of a text are the ids
of its words. The reference encodes a word when it first appears; then its ids are looked up. Words
are cut at white space and signs of ASCII only. What else the tokenizer cuts at is inside a word.

SentencePiece's Unigram tokenizers (T5, XLM-R, ALBERT) cut a text before each space. Their words
begin with the space. A space is a cut only if the characters on both sides are letters, numerals or
signs that the normalizer neither removes nor joins to a space. Most of these tokenizers join runs
of white space. Then such a run is cut like one space, so a word of source code is the same word
behind any indentation.
"""

import itertools
import json
import re
import string
import unicodedata
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers.models import Unigram, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from tokenfeed.pipeline.arithmetic import Ragged, offsets_of, ranges, take
from tokenfeed.tools.encoding.engine_support import COMPARED_TOKENIZERS
from tokenfeed.tools.encoding.routes import matches
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.encoding.unigram import UnigramWords

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
    """Caches the ids of every word that was encoded."""

    def __init__(self, tokenizer: TextTokenizer, encode: Encode, apart: str) -> None:
        self._tokenizer, self._encode = tokenizer.tokenizer, encode
        self._apart = apart
        """A regular expression of special tokens. Texts that have one are encoded whole."""
        self._numbers: dict[bytes, int] = {}
        self._ids = Ragged(np.empty(0, np.uint32), np.empty(0, np.int64))
        """By the word's number."""
        self._bytes = 0

    @classmethod
    def of_tokenizer(cls, tokenizer: TextTokenizer, encode: Encode) -> Self | None:
        """Return the cache for a tokenizer; None if its words cannot be encoded alone.

        Args:
            tokenizer: Any.
            encode: Used for texts with special tokens and for words beyond ASCII.
        """
        inner = tokenizer.tokenizer
        added = inner.get_added_tokens_decoder().values()
        parts = zip((inner.normalizer, inner.pre_tokenizer, inner.model), _TYPES, strict=True)
        if (
            not tokenizers.__version__.startswith(COMPARED_TOKENIZERS)
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
        joined = b"".join(texts)
        if not joined or len(joined) >= _ARROW_BYTES:
            return self._encode(texts)
        if self._bytes > CACHE_BYTES:
            self._numbers.clear()
            self._ids, self._bytes = Ragged(self._ids.values[:0], self._ids.lengths[:0]), 0
        ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
        data, ends, starts = self._cut(np.frombuffer(joined, np.uint8), ends)
        is_cut = np.zeros(len(data) + 1, bool)
        is_cut[0] = is_cut[ends] = is_cut[starts] = True
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
            new, made = self._encode_new(new)
            first = len(self._numbers)
            self._bytes += sum(map(len, new)) + _WORD_BYTES * len(new)
            self._numbers.update(zip(new, itertools.count(first), strict=False))
            values = [self._ids.values, *(part.values.astype(np.uint32) for part in made)]
            lengths = [self._ids.lengths, *(part.lengths for part in made)]
            self._ids = Ragged(np.concatenate(values), np.concatenate(lengths))
        return np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))

    def _cut(self, data: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cut texts into words.

        Args:
            data: All texts, uint8.
            ends: The end of each text.

        Returns:
            Data with the same ids, its ends, and where words begin, beside the beginnings of texts.
        """
        is_border = _IS_BORDER[data]
        return data, ends, np.flatnonzero(is_border[1:] | is_border[:-1]) + 1

    def _encode_new(self, words: list[bytes]) -> tuple[list[bytes], list[Ragged]]:
        """Encode words. Return them in another order, and their ids in that order."""
        plain = [word for word in words if word.isalnum()]  # of ASCII, as bytes
        others = [word for word in words if not word.isalnum()]
        return plain + others, [self._encode_plain(plain), self._encode(others)]

    def _encode_plain(self, words: list[bytes]) -> Ragged:
        """Encode letters and digits of ASCII, of which a normalizer could only change the case."""
        lowercase = bool(self._tokenizer.normalizer.lowercase)
        found = [(word.lower() if lowercase else word).decode() for word in words]
        ids = [[token.id for token in self._tokenizer.model.tokenize(word)] for word in found]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = itertools.chain.from_iterable(ids)
        return Ragged(np.fromiter(flat, np.uint32, int(lengths.sum())), lengths)


_LOCAL = {"Precompiled", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents"}
"""Normalizers that look at no character on the other side of a space between plain characters."""
_RUNS_OF_SPACES = {"Regex": " {2,}"}
_EXTENDING = "\uff9e\uff9f\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"
"""Letters and signs that belong to the character before them."""
_PREPENDED = (
    "\u0d4e\U000111c2\U000111c3\U000113d1\U0001193f\U00011941\U00011a3a\U00011d46\U00011f02"
)
_PREPENDED += "".join(map(chr, range(0x11A84, 0x11A8A)))
"""Letters that the character after them belongs to."""
_KNOWN, _BEFORE, _AFTER = np.uint8(1), np.uint8(2), np.uint8(4)


class SpacedWords(Words):
    """Words of a Unigram tokenizer, each with the space before it."""

    def __init__(self, tokenizer: TextTokenizer, encode: Encode, apart: str) -> None:
        super().__init__(tokenizer, encode, apart)
        content = json.loads(tokenizer.json_bytes)
        splits = "WhitespaceSplit" in str(content["pre_tokenizer"])
        """Whether any white space ends a piece, and is dropped."""
        is_space = (self._normalized(f"q{c}q") == self._normalized("q q") for c in " \t\n\r")
        self._spaces = [
            ord(c) for c, same in zip(" \t\n\r", is_space, strict=True) if same or splits
        ]
        steps = _flat(content["normalizer"], "normalizers")
        joins = bool(steps) and steps[-1]["type"] == "Replace" and _joins_spaces(steps[-1])
        runs = itertools.product(map(chr, self._spaces), repeat=2)
        self._joins_spaces = (splits or joins) and all(
            self._pieces(f"q{a}{b}q") == self._pieces("q q") for a, b in runs
        )
        printable = "".join(map(chr, range(0x21, 0x7F)))
        replaces = any(step["type"] == "Replace" and not _joins_spaces(step) for step in steps)
        keeps_ascii = not replaces and all(self._normalized(c) == c for c in printable)
        self._plain = UnigramWords.from_tokenizer(tokenizer.tokenizer) if keeps_ascii else None
        contents = [re.escape(each["content"].encode()) for each in content["added_tokens"]]
        self._added = re.compile(b"|".join(contents) or rb"(?!)").search
        self._about = np.zeros(0x110000, np.uint8)
        """What is known of each character: may it stand before or after a cut?"""

    @classmethod
    def of_tokenizer(cls, tokenizer: TextTokenizer, encode: Encode) -> Self | None:
        """See `Words`."""
        if not tokenizers.__version__.startswith(COMPARED_TOKENIZERS):
            return None
        if not isinstance(tokenizer.tokenizer.model, Unigram):
            return None
        content = json.loads(tokenizer.json_bytes)
        steps = _flat(content["pre_tokenizer"], "pretokenizers")
        added = content.get("added_tokens") or []
        is_known = (
            [step["type"] for step in steps] in (["Metaspace"], ["WhitespaceSplit", "Metaspace"])
            and steps[-1].get("split", True)
            and steps[-1]["replacement"] == "\u2581"
            and all(map(_is_local, _flat(content["normalizer"], "normalizers")))
            and not any(
                each["rstrip"] or re.search(r"[\s\u2581]", each["content"]) for each in added
            )
        )
        return cls(tokenizer, encode, "") if is_known else None

    def _pieces(self, text: str) -> list[str]:
        split = self._tokenizer.pre_tokenizer.pre_tokenize_str(self._normalized(text))
        return [piece for piece, _ in split]

    def _normalized(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    def _cut(self, data: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `Words`. White space before a word becomes one space."""
        text, starts = data.tobytes(), np.arange(len(data))
        characters = data
        if not text.isascii():
            starts = np.flatnonzero((data & 0xC0) != 0x80)
            characters = np.frombuffer(text.decode().encode("utf-32-le"), "<u4")
        is_space = np.zeros(len(characters), bool)
        for space in self._spaces:
            is_space |= characters == space
        is_space[[0, -1]] = False
        changes = np.flatnonzero(is_space[1:] != is_space[:-1]) + 1
        firsts, stops = changes[::2], changes[1::2]  # of runs; a space is one byte
        sizes = stops - firsts
        before, after = characters[firsts - 1], characters[stops]
        for each in np.flatnonzero(np.bincount(np.concatenate([before, after]))).tolist():
            if not self._about[each]:
                self._about[each] = self._find_out(chr(each))
        is_cut = ((self._about[before] & _BEFORE) != 0) & ((self._about[after] & _AFTER) != 0)
        if not self._joins_spaces:
            is_cut &= sizes == 1
        firsts = starts[firsts]
        is_cut &= np.searchsorted(ends, firsts) == np.searchsorted(ends, firsts + sizes, "right")
        firsts, sizes = firsts[is_cut], sizes[is_cut]
        kept = np.ones(len(data), bool)
        kept[ranges(firsts + 1, sizes - 1)] = False
        removed = offsets_of(sizes - 1)
        data = data.copy()
        data[firsts] = ord(" ")
        ends = ends - removed[np.searchsorted(firsts, ends)]
        return data[kept], ends, firsts - removed[:-1]

    def _find_out(self, character: str) -> np.uint8:
        """Return whether a character may stand before or after the space of a cut."""
        found, category = _KNOWN, unicodedata.category(character)[0]
        alone = self._normalized("q")
        if category in "LMNPS" and character not in _PREPENDED:
            made = self._normalized("q" + character)
            if made.startswith(alone) and made[len(alone) :].strip() == made[len(alone) :] != "":
                found |= _BEFORE
        if category in "LNPS" and character not in _EXTENDING:
            whole, head = self._normalized(f"q {character}q"), f"{alone} "
            made = whole[len(head) : -len(alone)]
            if whole == head + made + alone and made.strip() == made != "":
                found |= _AFTER
        return found

    def _encode_new(self, words: list[bytes]) -> tuple[list[bytes], list[Ragged]]:
        if not self._plain:
            return words, [self._encode(words)]
        is_plain = self._plain.can_encode(words)
        if self._added(b"\n".join(words)):
            is_plain &= [not self._added(word) for word in words]
        plain, others = (list(itertools.compress(words, each)) for each in (is_plain, ~is_plain))
        made = [self._plain.encode(plain)] if plain else []
        return plain + others, [*made, self._encode(others)]


def _flat(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [found for inner in step[name] for found in _flat(inner, name)]
    return [step]


def _is_local(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return (
            _joins_spaces(step) or " " not in step["pattern"].get("String", " ") + step["content"]
        )
    return step["type"] in _LOCAL


def _joins_spaces(step: dict[str, Any]) -> bool:
    """Return whether a `Replace` makes one space of a run of spaces."""
    return step["pattern"] == _RUNS_OF_SPACES and step["content"] in (" ", "\u2581")
