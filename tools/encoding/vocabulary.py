"""Vocabularies and merges: what they must be like for the fast engine to read them rightly.

The fast engine knows tokens by their bytes, the reference by their strings, so that two strings
must not mean the same bytes. Where several merges make one token, the order among them is of no
account: what the merges before have made of its text is one pair only. The checks are over
100,000s of strings and so are set operations.
"""

import re
from itertools import chain
from typing import Any, Literal

import msgspec

__all__ = ["ID_LIMIT", "TokenizerKind", "Unproved", "byte_letters", "check_vocabulary"]

TokenizerKind = Literal["byte-level", "SentencePiece"]

ID_LIMIT = 10_000_000
"""Ids are below; engines hold tables as long as the largest id."""

_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
_BYTE_LIKE = re.compile("<0x..>", re.DOTALL)
_BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}


class Unproved(Exception):
    """Something about a tokenizer for which no test has shown that the fast engine is right."""


def byte_letters() -> dict[int, str]:
    """The letter that each byte is written as in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }


def check_vocabulary(
    kind: TokenizerKind, vocab: bytes, merges: bytes, *, findable: set[str] | None
) -> None:
    """Look at a vocabulary and its merges, as JSON.

    Args:
        kind: How its tokens are written.
        vocab: An object of tokens and their ids.
        merges: A list of pairs, or of strings with a space between the two.
        findable: Tokens that are looked for in the text itself; None where that is all the same,
            for a word is merged even if it is a token as a whole.

    Raises:
        Unproved: The message says what is unusual about it.
    """
    ids, pairs = _ids(vocab), _pairs(merges)
    if kind == "byte-level":
        _check_byte_level(ids, pairs, findable)
    else:
        _check_sentence_piece(ids, pairs)


def _ids(vocab: bytes) -> dict[str, int]:
    ids: dict[str, int] = _decoded(vocab, dict[str, int])
    if len(set(ids.values())) < len(ids):
        raise Unproved("two tokens of the vocabulary have the same id")
    return ids


def _pairs(merges: bytes) -> list[tuple[str, str]]:
    listed = _decoded(merges, list[tuple[str, str] | str])
    if listed and isinstance(listed[0], str):
        listed = [tuple(merge.split(" ")) for merge in listed if isinstance(merge, str)]
    pairs: list[Any] = listed
    if len(set(pairs)) < len(pairs):
        raise Unproved("two merges are the same")
    return pairs


def _decoded(raw: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise Unproved(f"the vocabulary or the merges: {error}") from None


def _check_byte_level(
    ids: dict[str, int], pairs: list[tuple[str, str]], findable: set[str] | None
) -> None:
    letters = byte_letters()
    known = set(letters.values())
    if missing := [b for b in letters if letters[b] not in ids and b not in _NEVER_IN_UTF8]:
        raise Unproved(f"a vocabulary without the byte 0x{missing[0]:02X}")
    if not known.issuperset(chain.from_iterable(chain.from_iterable(pairs))):
        raise Unproved("merges of tokens that are not written in bytes")
    for token in ids:
        if known.issuperset(token):
            continue
        written = "".join(letters[byte] for byte in token.encode())
        is_reachable = findable is not None and token not in findable
        if written in ids or len(written) == 1 or is_reachable:
            raise Unproved(f"the token {token!r}, which is not written in bytes")


def _check_sentence_piece(ids: dict[str, int], pairs: list[tuple[str, str]]) -> None:
    for token in filter(_BYTE_LIKE.fullmatch, ids):
        if token not in _BYTE_TOKENS:
            raise Unproved(f"the token {token!r}, which is almost one of a byte")
    for token, byte in _BYTE_TOKENS.items():
        is_covered = byte in _NEVER_IN_UTF8 or (byte < 0x80 and chr(byte) in ids)
        if token not in ids and not is_covered:
            raise Unproved(f"a vocabulary without {token}")
    if any(left in _BYTE_TOKENS or right in _BYTE_TOKENS for left, right in pairs):
        raise Unproved("merges of byte tokens")
    cuts = ((token[:place], token[place:]) for token in _BYTE_TOKENS for place in range(1, 6))
    if not set(cuts).isdisjoint(pairs):
        raise Unproved("merges that make byte tokens")
