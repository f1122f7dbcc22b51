"""Find the texts that only the reference encodes correctly, by the characters they contain.

The fast engine is right about every text without certain characters and added tokens. A scan finds
the texts that contain them. The scan of a text does not depend on the batch, so neither the number
of workers nor a kill can change an id. The scan takes nearly no time for ASCII, and for texts
without a byte that begins one of the characters.

The characters below are those that the fast engine (Unicode 17) and the reference (Unicode 16)
classify differently: to the reference, newer characters are unassigned.
`tests/support/programs/character_probe.py` found them: it encodes every character in every
neighbourhood that a regex of the table of shapes tells apart, by gigatoken 0.10 and by `tokenizers`
0.21 to 0.23; tests repeat this with the installed versions.

Texts are also cut at numbers here, for pre-tokenizers that the fast engine lacks. Some of these
encode a number apart from the text around it. An engine without such a pre-tokenizer gives the same
ids if texts are cut there: its regex never looks back, and ends a match at the end of a piece as it
would at a number.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress, islice
from typing import Self
from unicodedata import category, is_normalized

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import pre_tokenizers

from tokenfeed.pipeline.arithmetic import binaries
from tokenfeed.tools.encoding.fast.shapes import AddedToken, Shape, byte_letters

# fmt: off
LETTERS: tuple[tuple[int, int], ...] = (
    (0x088f, 0x088f), (0x0c5c, 0x0c5c), (0x0cdc, 0x0cdc), (0x1acf, 0x1add), (0x1ae0, 0x1aeb),
    (0xa7ce, 0xa7cf), (0xa7d2, 0xa7d2), (0xa7d4, 0xa7d4), (0xa7f1, 0xa7f1), (0x10940, 0x10959),
    (0x10ec5, 0x10ec7), (0x10efa, 0x10efb), (0x11b60, 0x11b67), (0x11db0, 0x11ddb),
    (0x11de0, 0x11de9), (0x16ea0, 0x16eb8), (0x16ebb, 0x16ed3), (0x16ff2, 0x16ff6),
    (0x187f8, 0x187ff), (0x18d09, 0x18d1e), (0x18d80, 0x18df2), (0x1e6c0, 0x1e6de),
    (0x1e6e0, 0x1e6f5), (0x1e6fe, 0x1e6ff), (0x2b73a, 0x2b73f), (0x2cea2, 0x2cead),
    (0x323b0, 0x33479),
)
# fmt: on
"""Letters that the engines classify differently, for every byte-level shape."""

# fmt: off
SIGNS: tuple[tuple[int, int], ...] = (
    (0x20c1, 0x20c1), (0x2b96, 0x2b96), (0xfbc3, 0xfbd2), (0xfd90, 0xfd91), (0xfdc8, 0xfdce),
    (0x10ed0, 0x10ed8), (0x1ccfa, 0x1ccfc), (0x1ceba, 0x1ced0), (0x1cee0, 0x1cef0),
    (0x1f6d8, 0x1f6d8), (0x1f777, 0x1f77a), (0x1f8d0, 0x1f8d8), (0x1fa54, 0x1fa57),
    (0x1fa8a, 0x1fa8a), (0x1fa8e, 0x1fa8e), (0x1fac8, 0x1fac8), (0x1facd, 0x1facd),
    (0x1faea, 0x1faea), (0x1faef, 0x1faef), (0x1fbfa, 0x1fbfa),
)
# fmt: on
"""Signs that the engines classify differently, for regexes with \\p{P} or \\p{S}."""

NUMERALS: tuple[tuple[int, int], ...] = (
    *((code, code) for code in range(0x80, 0x10000) if category(chr(code))[0] == "N"),
    *((0x10107, 0x1D7FF), (0x1E140, 0x1E149), (0x1E2F0, 0x1E2F9), (0x1E4F0, 0x1E5FA)),
    *((0x1E8C7, 0x1E959), (0x1EC71, 0x1ED3D), (0x1F100, 0x1F10C), (0x1FBF0, 0x1FBF9)),
)
"""Every character beyond ASCII that the reference classifies as a number, in any release, and some
other characters above 0x10000. Since Unicode 14, no numbers were added below."""

NFC_LEADS = tuple(
    bytes([lead])
    for lead in (
        *(0xCC, 0xCD, 0xCE, 0xD2, 0xD6, 0xD7, 0xD8, 0xD9, 0xDB, 0xDC, 0xDD, 0xDF),
        *(0xE0, 0xE1, 0xE2, 0xE3, 0xEA, 0xEF, 0xF0),
    )
)
"""First bytes in UTF-8 of the characters that NFC may change, reorder, or compose with the previous
character."""


_CONTENTS_AT_ONCE = 200
"""Added tokens per regular expression. RE2 limits the memory of an expression."""


@dataclass(frozen=True, slots=True)
class Routes:
    """Which texts `tokenizers`, the reference, must encode, because gigatoken would differ."""

    contents: tuple[str, ...]
    """Regular expressions that match added tokens."""
    characters: str
    """The inside of a character class: characters that the engines classify differently. May be
    empty."""
    leads: tuple[bytes, ...]
    """The first bytes of these characters in UTF-8."""
    composes: bool
    """Whether the reference must encode texts that NFC would change."""

    @classmethod
    def from_shape(cls, shape: Shape, *, splits_special: bool) -> Self:
        """Return the routes of a tokenizer's shape."""
        _, sought = sort_tokens(shape, splits_special=splits_special)
        ranges = _ranges(shape)
        return cls(
            tuple(_expressions([token.content for token in sought])),
            character_class(ranges),
            lead_bytes(ranges),
            shape.kind == "byte-level" and bool(shape.normalizer),
        )

    def find(self, texts: list[bytes]) -> np.ndarray:
        """Return the indexes of the texts that go to the reference, ascending, int64."""
        found = np.zeros(len(texts), bool)
        for expression in self.contents:
            found |= matches(expression, texts)
        if self.characters or self.composes:
            is_ascii = np.fromiter(map(bytes.isascii, texts), bool, len(texts))
            others = np.flatnonzero(~(is_ascii | found))
            found[others] = self._find_letters([texts[place] for place in others])
        return np.flatnonzero(found)

    def _find_letters(self, texts: list[bytes]) -> np.ndarray:
        """Return which texts contain one of the characters or are not in NFC, bool."""
        found = np.zeros(len(texts), bool)
        if self.composes and (suspect := having(texts, NFC_LEADS)).any():
            suspects = compress(texts, suspect)
            found[suspect] = [not is_normalized("NFC", text.decode()) for text in suspects]
        if (suspect := having(texts, self.leads)).any():
            found[suspect] |= matches(f"[{self.characters}]", list(compress(texts, suspect)))
        return found


def sort_tokens(shape: Shape, *, splits_special: bool) -> tuple[list[AddedToken], list[AddedToken]]:
    """Return the added tokens for the fast engine, and the added tokens whose texts go to the
    reference.

    The reference searches twice: the second search is for `normalized` tokens, in the normalized
    text. If special tokens are plain text, the reference still finds them, discards them, and
    misses tokens that overlap with them. The fast engine searches once. So texts with tokens that
    may overlap across these groups go to the reference.
    """
    ignored = [] if splits_special else [token for token in shape.added_tokens if token.special]
    wanted = [token for token in shape.added_tokens if splits_special or not token.special]
    odd = [token for token in wanted if _is_odd(token, shape)]
    plain = [token for token in wanted if not _is_odd(token, shape)]
    first = [token for token in plain if not token.normalized]
    second = [token for token in plain if token.normalized]
    late = _overlapping(second, first)
    kept = [token for token in plain if token not in late]
    return kept, [*odd, *late, *_overlapping(ignored, kept), *_unreadable(ignored, shape)]


def _ranges(shape: Shape) -> tuple[tuple[int, int], ...]:
    """Return the characters that the regexes of a shape may classify differently. SentencePiece has
    none."""
    if shape.kind == "SentencePiece":
        return ()
    if shape.proved.digits == 2:
        return LETTERS + NUMERALS
    tells_signs = any(r"\p{S}" in step for step in shape.pre_tokenizer)
    return LETTERS + SIGNS if tells_signs else LETTERS


def _is_odd(token: AddedToken, shape: Shape) -> bool:
    is_late = token.normalized and shape.kind == "SentencePiece"
    is_cut = shape.proved.digits and any(c.isnumeric() or c.isspace() for c in token.content)
    return token.single_word or token.lstrip or token.rstrip or is_late or bool(is_cut)


def _unreadable(ignored: list[AddedToken], shape: Shape) -> list[AddedToken]:
    """Return the special tokens that, as plain text, only the fast engine encodes as one word."""
    letters = set(byte_letters().values()) if shape.model.ignore_merges else None
    return [token for token in ignored if letters and not letters.issuperset(token.content)]


def _overlapping(tokens: list[AddedToken], others: list[AddedToken]) -> list[AddedToken]:
    """Return the `tokens` of which an occurrence can share a character with one of `others`."""
    starts = {other.content[:end] for other in others for end in range(1, len(other.content) + 1)}
    ends = {other.content[start:] for other in others for start in range(len(other.content))}
    contents = {other.content for other in others}
    whole = "\0".join(contents)

    def overlaps(text: str) -> bool:
        places = range(len(text))
        return (
            text in whole
            or any(text[place:] in starts or text[: place + 1] in ends for place in places)
            or any(other in text for other in contents)
        )

    return [token for token in tokens if others and overlaps(token.content)]


def _expressions(contents: list[str]) -> Iterator[str]:
    """Yield regular expressions that match any of the contents, some contents in each.

    A normalizer may have replaced spaces by marks.
    """
    waiting = iter(sorted(set(contents)))
    while some := list(islice(waiting, _CONTENTS_AT_ONCE)):
        yield "|".join(
            re.sub("(\\\\ |\u2581)", "[ \u2581]", re.escape(content)) for content in some
        )


def character_class(ranges: tuple[tuple[int, int], ...]) -> str:
    """Return ranges of characters as the inside of a character class of RE2."""
    return "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in ranges)


def lead_bytes(ranges: tuple[tuple[int, int], ...]) -> tuple[bytes, ...]:
    """The bytes that begin characters of some ranges in UTF-8, rising."""
    leads: set[bytes] = set()
    for first, last in ranges:
        leads.update(bytes([b]) for b in range(chr(first).encode()[0], chr(last).encode()[0] + 1))
    return tuple(sorted(leads))


def having(texts: list[bytes], leads: tuple[bytes, ...]) -> np.ndarray:
    """Return which texts contain one of the bytes, bool. Fast if most bytes are in no text."""
    found = np.zeros(len(texts), bool)
    joined = b"".join(texts)
    for lead in leads:
        if lead in joined:
            found |= np.fromiter((lead in text for text in texts), bool, len(texts))
    return found


def matches(expression: str, texts: list[bytes]) -> np.ndarray:
    """Return which texts match a regular expression of RE2, bool.

    The result is read from the bits of the Arrow array, because `to_numpy` would import pandas.
    """
    matching = pc.match_substring_regex(binaries(texts).view(pa.large_string()), expression)  # pyright: ignore[reportAttributeAccessIssue]
    bits = np.frombuffer(matching.buffers()[1] or b"", np.uint8)
    return np.unpackbits(bits, count=len(texts), bitorder="little").view(bool)


_LEADS = lead_bytes(NUMERALS)
_NUMERAL = f"[{character_class(NUMERALS)}]"
_SPACES = (*" \t\x0b\x0c", *map(chr, (0x85, 0xA0, 0x1680, *range(0x2000, 0x200B))))
_SPACES += tuple(map(chr, (0x2028, 0x2029, 0x202F, 0x205F, 0x3000)))
"""White space but line breaks."""


def cut(texts: list[bytes], digits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut texts at their numbers.

    Args:
        texts: UTF-8.
        digits: 0 cuts between texts only. 1 cuts out every digit, also digits beyond ASCII, like
            `Digits`. 2 cuts out every two digits of ASCII, and a space before a number, like
            nanochat's regex.

    Returns:
        The bytes of all texts (uint8), offsets of the pieces in them (int64, [N + 1]), and the
        offset at which each text ends (int64, [texts]).
    """
    data = np.frombuffer(b"".join(texts), np.uint8)
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    is_digit = (data >= ord("0")) & (data <= ord("9"))
    is_cut = np.zeros(len(data) + 1, bool)
    is_cut[0] = is_cut[ends] = True
    if digits == 1:
        is_cut[:-1] |= is_digit
        is_cut[1:] |= is_digit
        _cut_numerals(texts, ends, is_cut)
    if digits == 2:
        _cut_pairs(data, is_digit, is_cut)
    return data, np.flatnonzero(is_cut), ends


def _cut_numerals(texts: list[bytes], ends: np.ndarray, is_cut: np.ndarray) -> None:
    """Cut where the reference does, in texts with numerals beyond ASCII."""
    suspect = having(texts, _LEADS)
    places = np.flatnonzero(suspect)
    for place in places[matches(_NUMERAL, [texts[place] for place in places])]:
        pieces = pre_tokenizers.Digits(True).pre_tokenize_str(texts[place].decode())
        sizes = np.fromiter((len(piece.encode()) for piece, _ in pieces), np.int64, len(pieces))
        is_cut[ends[place] - len(texts[place]) + np.cumsum(sizes)] = True


def _cut_pairs(data: np.ndarray, is_digit: np.ndarray, is_cut: np.ndarray) -> None:
    """Cut numbers into two digits each from their start, and spaces before numbers."""
    is_first = is_digit.copy()
    is_first[1:] &= ~is_digit[:-1] | is_cut[1:-1]  # a text ends there
    places = np.flatnonzero(is_digit)
    first = np.maximum.accumulate(np.where(is_first[places], places, 0))
    numbers = np.flatnonzero(is_first & ~is_cut[:-1])
    is_cut[places[(places - first) % 2 == 0]] = True
    is_cut[1:] |= is_digit & ~np.append(is_digit[1:], False)
    # `\s+(?!\S)` leaves the last space before a number to the number.
    for space in map(str.encode, _SPACES):
        starts = numbers - len(space)
        starts = starts[starts >= 0]
        for place, byte in enumerate(space):
            starts = starts[data[starts + place] == byte]
        is_cut[starts] = True
