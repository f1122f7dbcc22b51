"""Cut texts at numbers, for pre-tokenizers that the fast engine lacks.

Some pre-tokenizers encode a number apart from the text around it. An engine without such a
pre-tokenizer gives the same ids if texts are cut there: its regex never looks back, and ends a
match at the end of a piece as it would at a number.
"""

import numpy as np
from tokenizers import pre_tokenizers

from tokenfeed.tools.encoding.routes import NUMERALS, character_class, having, lead_bytes, matches

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
