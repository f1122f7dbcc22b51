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
import re
import string
import unicodedata
from collections.abc import Callable
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers.models import Unigram, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from tokenfeed.pipeline.arithmetic import Ragged, offsets_of, ranges
from tokenfeed.tools.encoding.engine_support import COMPARED_TOKENIZERS
from tokenfeed.tools.encoding.routes import matches
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.encoding.unigram import MARK, UnigramWords

Encode = Callable[[list[bytes]], Ragged]
"""Encodes UTF-8 texts or words."""
_WORD_BYTES = 120
"""What a word takes beside its letters."""


class WordCache:
    """The ids of words, by the bytes of each word. A word has the same ids wherever it stands."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """About the memory that the words take."""
        self._numbers: dict[bytes, int] = {}
        self._ids, self._offsets = np.empty(0, np.uint32), np.zeros(1, np.int64)
        """All ids, and where those of each number begin."""

    def __len__(self) -> int:
        return len(self._numbers)

    def find(self, data: np.ndarray, cuts: np.ndarray, encode_new: Encode) -> np.ndarray:
        """Return the number of each word, shape (W,).

        Args:
            data: All words, uint8.
            cuts: Where each word begins, and the end, shape (W + 1,).
            encode_new: Encodes distinct words that were never found before.
        """
        buffers = [None, pa.py_buffer(cuts.astype(np.int32)), pa.py_buffer(data)]
        found = pa.Array.from_buffers(pa.binary(), len(cuts) - 1, buffers).dictionary_encode()
        words = found.dictionary.to_pylist()
        known = map(self._numbers.get, words, itertools.repeat(-1))
        numbers = np.fromiter(known, np.int64, len(words))
        is_new = numbers < 0
        if is_new.any():
            new = [*itertools.compress(words, is_new)]
            made = encode_new(new)
            first = len(self._numbers)
            self._numbers.update(zip(new, itertools.count(first), strict=False))
            numbers[is_new] = np.arange(first, first + len(new))
            self._ids = np.concatenate([self._ids, made.values.astype(np.uint32)])
            self._offsets = np.append(self._offsets, self._offsets[-1] + np.cumsum(made.lengths))
            self.num_bytes += sum(map(len, new)) + _WORD_BYTES * len(new)
        # `to_numpy` would import pandas.
        indexes = np.frombuffer(found.indices.buffers()[1] or b"", np.int32)
        of_words: np.ndarray = numbers[indexes]
        return of_words

    def ids(self, numbers: np.ndarray, ends: np.ndarray) -> Ragged:
        """Return the ids of rows of words.

        Args:
            numbers: The number of each word, shape (W,).
            ends: The end of each row in `numbers`, shape (R,).
        """
        starts = self._offsets[numbers]
        lengths = self._offsets[numbers + 1] - starts
        # Most words have one or two ids: then, an index per id is faster than `take`.
        return Ragged(
            self._ids[ranges(starts, lengths)], np.diff(offsets_of(lengths)[ends], prepend=0)
        )


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
    """Caches the ids of every word that was encoded."""

    def __init__(self, tokenizer: TextTokenizer, encode: Encode, apart: str) -> None:
        self._tokenizer, self._encode = tokenizer.tokenizer, encode
        self._apart = apart
        """A regular expression of special tokens. Texts that have one are encoded whole."""
        self._cache = WordCache()

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
        plain = self._encode_words([*itertools.compress(texts, ~is_apart)])
        return _woven(is_apart, self._encode([*itertools.compress(texts, is_apart)]), plain)

    def _encode_words(self, texts: list[bytes]) -> Ragged:
        if not 0 < sum(map(len, texts)) < _ARROW_BYTES:
            return self._encode(texts)
        if self._cache.num_bytes > CACHE_BYTES:
            self._cache = WordCache()
        data, ends, words = self._cut(texts)
        cuts, numbers = self._found(data, words)
        return self._cache.ids(numbers, np.searchsorted(cuts, ends))

    def _found(self, data: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where words or their parts begin, with the end of the last one, and the number of
        each in the cache."""
        return words, self._cache.find(data, words, self._encode_new)

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
        return _woven(is_plain, plain, self._encode([*itertools.compress(words, ~is_plain)]))

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
_EXTENDING = "\u0e33\u0eb3\uff9e\uff9f\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"
"""Letters and signs that belong to the character before them."""
_PREPENDED = (
    "\u0d4e\U000111c2\U000111c3\U000113d1\U0001193f\U00011941\U00011a3a\U00011d46\U00011f02"
)
_PREPENDED += "".join(map(chr, range(0x11A84, 0x11A8A)))
"""Letters that the character after them belongs to."""
_FIRST, _LEFT_OUT = b"\xff", b"\xfe"
_KNOWN, _BEFORE, _AFTER, _IS_MARK = map(np.uint8, (1, 2, 4, 8))


class SpacedWords(Words):
    """Words of a Unigram tokenizer, each with the space before it, and parts of words.

    A byte that is never in UTF-8 stands before each text. So the first word of a text, which has no
    space before it, is not taken for a part.
    """

    def __init__(self, tokenizer: TextTokenizer, encode: Encode, apart: str) -> None:
        super().__init__(tokenizer, encode, apart)
        content = msgspec.json.decode(tokenizer.json_bytes)
        splits = "WhitespaceSplit" in str(content["pre_tokenizer"])
        """Whether any white space ends a piece, and is dropped."""
        between = {c: self._normalized(f"q{c}q").strip("q") for c in " \t\n\r"}
        self._spaces = [
            ord(c) for c, made in between.items() if made == " " or (splits and made.isspace())
        ]
        steps = _flat(content["normalizer"], "normalizers")
        joins = bool(steps) and _joins_spaces(steps[-1])
        spaces = [*map(chr, self._spaces)]
        runs = (run for size in (2, 3) for run in itertools.product(spaces, repeat=size))
        self._joins_spaces = (splits or joins) and all(
            self._pieces(f"q{''.join(run)}q") == self._pieces("q q") for run in runs
        )
        printable = "".join(map(chr, range(0x21, 0x7F)))
        replaces = any(step["type"] == "Replace" and not _joins_spaces(step) for step in steps)
        keeps_ascii = not replaces and all(self._normalized(c) == c for c in printable)
        self._plain = UnigramWords.from_tokenizer(tokenizer.tokenizer) if keeps_ascii else None
        contents = [each["content"] for each in content["added_tokens"]]
        if (unknown := content["model"].get("unk_id")) is not None:
            contents.append(content["model"]["vocab"][unknown][0])  # two of them become one
        # A run of spaces that becomes a mark is not stripped before these.
        stripping = (
            each["content"].encode()[0]
            for each in content["added_tokens"]
            if joins and steps[-1]["content"] == MARK
            if splits or (each["normalized"] and each["lstrip"])
        )
        self._strips = np.zeros(256, bool)
        """Whether each byte begins an added token before which a run of spaces is not one space."""
        self._strips[[*stripping]] = True
        pattern = b"|".join(re.escape(each.encode()) for each in contents)
        self._added = re.compile(pattern or rb"(?!)")
        self._is_unsure = np.empty(0, bool)
        """By the number in the cache: is it a part that may have other ids in a word?"""
        self._about = np.zeros(0x110000, np.uint8)
        """What is known of each character: may it stand before or after a cut? Is it a mark?"""

    @classmethod
    def of_tokenizer(cls, tokenizer: TextTokenizer, encode: Encode) -> Self | None:
        """See `Words`."""
        if not tokenizers.__version__.startswith(COMPARED_TOKENIZERS):
            return None
        if not isinstance(tokenizer.tokenizer.model, Unigram):
            return None
        content = msgspec.json.decode(tokenizer.json_bytes)
        steps = _flat(content["pre_tokenizer"], "pretokenizers")
        splits = len(steps) > 1
        added = content.get("added_tokens") or []
        normalizer = tokenizer.tokenizer.normalizer
        is_known = (
            [step["type"] for step in steps] in (["Metaspace"], ["WhitespaceSplit", "Metaspace"])
            and steps[-1].get("split", True)
            and steps[-1]["replacement"] == "\u2581"
            and (not splits or _prepends(steps[-1]))
            and all(
                _is_local(step) or (step["type"] == "Strip" and _prepends(steps[-1]))
                for step in _flat(content["normalizer"], "normalizers")
            )
            and not any(
                each["rstrip"]
                or re.search(r"[\s\u2581]", each["content"])
                or (
                    each["normalized"]
                    and normalizer
                    and normalizer.normalize_str(each["content"]) != each["content"]
                )
                for each in added
            )
        )
        return cls(tokenizer, encode, "") if is_known else None

    def _pieces(self, text: str) -> list[str]:
        split = self._tokenizer.pre_tokenizer.pre_tokenize_str(self._normalized(text))
        return [piece for piece, _ in split]

    def _normalized(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    def _cut(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `Words`. White space before a word becomes one space."""
        joined = _FIRST + _FIRST.join(texts)
        ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)) + 1)
        data = np.frombuffer(joined, np.uint8)
        is_space = np.zeros(len(data), bool)
        for space in self._spaces:
            is_space |= data == space
        is_space[-1] = False
        changes = np.flatnonzero(is_space[1:] != is_space[:-1]) + 1
        firsts, stops = changes[::2], changes[1::2]  # of runs
        sizes, before = stops - firsts, _before(data, firsts)
        about = self._about_characters(data, before)
        is_cut = ((about & _BEFORE) != 0) & ((self._about_characters(data, stops) & _AFTER) != 0)
        marks = np.flatnonzero(is_cut & ((about & _IS_MARK) != 0))
        while len(marks):  # a space with a mark may become one space: what has the mark?
            before[marks] = _before(data, before[marks])
            about = self._about_characters(data, before[marks])
            is_cut[marks] = (about & _BEFORE) != 0
            marks = marks[is_cut[marks] & ((about & _IS_MARK) != 0)]
        is_cut &= (sizes == 1) | ~self._strips[data[stops]] if self._joins_spaces else sizes == 1
        is_left_out = np.append(False, is_space[1:] & is_space[:-1])
        is_left_out[ranges(firsts[~is_cut] + 1, sizes[~is_cut] - 1)] = False
        firsts, shifts = firsts[is_cut], offsets_of(sizes[is_cut] - 1)
        data = data.copy()
        data[firsts] = ord(" ")
        np.putmask(data, is_left_out, ord(_LEFT_OUT))
        ends = ends - shifts[np.searchsorted(firsts, ends)]
        data = np.frombuffer(data.tobytes().translate(None, _LEFT_OUT), np.uint8)
        is_start = np.zeros(len(data) + 1, bool)
        is_start[0] = is_start[firsts - shifts[:-1]] = is_start[ends] = True
        return data, ends, np.flatnonzero(is_start)

    def _found(self, data: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Words`. Words with an unsure part get the ids of the whole word: its number for the
        first part, and the number of the empty word for the others."""
        if not (self._plain and self._plain.has_parts):
            return super()._found(data, words)
        added = [found.start() for found in self._added.finditer(data.tobytes())]
        cuts = self._plain.cut(data, words, added)
        numbers = self._cache.find(data, cuts, self._encode_new)
        unsure = np.flatnonzero(self._is_unsure[numbers])
        if len(unsure):
            places = np.unique(np.searchsorted(words, cuts[unsure], "right") - 1)
            begins, ends = words[places], words[places + 1]
            firsts, stops = np.searchsorted(cuts, begins), np.searchsorted(cuts, ends)
            letters = data[ranges(begins, ends - begins)]
            borders = np.append(0, offsets_of(ends - begins))  # an empty word, then these
            nothing, *whole = self._cache.find(letters, borders, self._encode_new)
            numbers[ranges(firsts, stops - firsts)] = nothing
            numbers[firsts] = whole
        return cuts, numbers

    def _about_characters(self, data: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return what is known of the characters that begin at places."""
        found = _characters(data, places)
        for each in np.unique(found[self._about[found] == 0]).tolist():
            self._about[each] = self._find_out(chr(each))
        about: np.ndarray = self._about[found]
        return about

    def _find_out(self, character: str) -> np.uint8:
        """Return whether a character may stand before or after the space of a cut."""
        found, category = _KNOWN, unicodedata.category(character)[0]
        alone = self._normalized("q")
        if category in "LMNPS" and character not in _PREPENDED:
            made = self._normalized("q" + character)
            if made.startswith(alone) and made[len(alone) :].strip() == made[len(alone) :] != "":
                is_mark = category == "M" or character in _EXTENDING
                found |= _BEFORE | (_IS_MARK if is_mark else 0)
        if category in "LNPS" and character not in _EXTENDING:
            whole, head = self._normalized(f"q {character}q"), f"{alone} "
            made = whole[len(head) : -len(alone)]
            is_kept = whole == head + made + alone and made.strip() == made != ""
            if is_kept and not made.startswith(MARK):
                found |= _AFTER
        return found

    def _encode_new(self, words: list[bytes]) -> Ragged:
        """See `Words`."""
        joined, is_plain = b"".join(words), np.zeros(len(words), bool)
        is_unsure = np.zeros(len(words), bool)
        if self._plain and joined:
            borders = offsets_of(np.fromiter(map(len, words), np.int64, len(words)))
            letters = np.frombuffer(joined, np.uint8)
            is_plain = self._plain.can_encode(letters, borders)
            if self._added.search(joined):
                is_plain &= [not self._added.search(word) for word in words]
        others = (word.removeprefix(_FIRST) for word in itertools.compress(words, ~is_plain))
        made = self._encode([*others])
        if self._plain and is_plain.any():
            parts = [*itertools.compress(words, is_plain)]
            plain, is_unsure[is_plain] = self._plain.encode(parts)
            is_unsure[is_plain] &= letters[borders[:-1][is_plain]] != ord(" ")
            made = _woven(is_plain, plain, made)
        self._is_unsure = np.append(self._is_unsure[: len(self._cache)], is_unsure)
        return made


def _before(data: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return where the characters before places begin."""
    starts: np.ndarray = places - 1
    for _ in range(3):
        starts = starts - ((data[starts] & 0xC0) == 0x80)
    return starts


def _characters(data: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the characters of UTF-8 that begin at places, int64. `_FIRST` is the last character of
    Unicode, which has no meaning."""
    found: np.ndarray = data[places].astype(np.int64)
    found[found == ord(_FIRST)] = 0x10FFFF
    wide = np.flatnonzero((found >= 0x80) & (found < 0x100))
    lead, num_more = found[wide], 1 + (found[wide] >= 0xE0) + (found[wide] >= 0xF0)
    codes = lead & (0x3F >> num_more)
    for number in range(1, 4):
        has = num_more >= number
        codes[has] = codes[has] << 6 | data[places[wide[has]] + number] & 0x3F
    found[wide] = codes
    return found


def _woven(is_first: np.ndarray, first: Ragged, second: Ragged) -> Ragged:
    """Return the rows of two in one order: a row of `first` for each True, or else of `second`."""
    made = Ragged(
        np.concatenate([first.values.astype(np.uint32), second.values.astype(np.uint32)]),
        np.concatenate([first.lengths, second.lengths]),
    )
    return made.take(np.argsort(np.argsort(~is_first, kind="stable")))


def _flat(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [found for inner in step[name] for found in _flat(inner, name)]
    return [step]


def _is_local(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace" and not _joins_spaces(step):
        return not re.search(r"\s", step["pattern"].get("String", " ") + step["content"])
    return step["type"] == "Replace" or step["type"] in _LOCAL


def _prepends(metaspace: dict[str, Any]) -> bool:
    """Return whether a mark is put before every text. Then a word that lost its space is the
    same."""
    old = "always" if metaspace.get("add_prefix_space", True) else "never"
    return bool(metaspace.get("prepend_scheme", old) == "always")


def _joins_spaces(step: dict[str, Any]) -> bool:
    """Return whether a `Replace` makes one space of a run of spaces."""
    is_run = step["type"] == "Replace" and step["pattern"] == _RUNS_OF_SPACES
    return is_run and step["content"] in (" ", "\u2581")
