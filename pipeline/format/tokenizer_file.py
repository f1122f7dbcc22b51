"""Decode a tokenizer.json: errors, panics and aborts of `tokenizers` become one error."""

import json
import re
from typing import Any

from tokenizers import Tokenizer

from tokenfeed.pipeline.format.read_errors import error_line

NOT_FAILURES = (KeyboardInterrupt, SystemExit, MemoryError)
"""Exceptions that do not come from a library. Every other exception does, even a panic in Rust."""
_HAS_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')
_ODD_ESCAPE = re.compile(rb"\\u00[4-7]")
"""Matches an escape that no program needs, but that may be in a key."""


def decode_tokenizer(content: bytes) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json.

    Raises:
        ValueError: The file is not a tokenizer. The message has one line.
    """
    if _HAS_PREFIX.search(content) or _ODD_ESCAPE.search(content):
        _check_merges(content)
    try:
        return Tokenizer.from_buffer(content)
    except BaseException as error:  # the library raises what its Rust side gives: no narrower class
        if isinstance(error, NOT_FAILURES):
            raise
        raise ValueError(error_line(error)) from error


def _check_merges(content: bytes) -> None:
    """Reject a merge whose second token is cut within a character.

    The library cuts the prefix of subwords off the second token, byte by byte. If the rest is not
    UTF-8, the message of its error is not UTF-8 either, and the library ends the process.

    Example: the prefix "a" and the merge of "a" and "é". The last byte of "é" remains.
    """
    sizes: list[int] = []
    merges: list[Any] = []

    def collect(pairs: list[tuple[str, Any]]) -> None:  # of each object, with all repeated keys
        for key, value in pairs:
            if key == "continuing_subword_prefix" and isinstance(value, str):
                sizes.append(len(value.encode("utf-8", "surrogatepass")))
            elif key == "merges" and isinstance(value, list):
                merges.extend(each for each in value if isinstance(each, str | list))

    try:
        json.loads(content, object_pairs_hook=collect, parse_int=str)
    except (ValueError, RecursionError):
        return  # the library rejects it, too
    for merge in merges:
        *_, second = merge.split(" ") if isinstance(merge, str) else merge or [""]
        encoded = second.encode("utf-8", "surrogatepass") if isinstance(second, str) else b""
        if any(0x80 <= byte < 0xC0 for size in sizes for byte in encoded[size : size + 1]):
            raise ValueError(f"the prefix of subwords cuts a character of {ascii(merge)[:80]}")
