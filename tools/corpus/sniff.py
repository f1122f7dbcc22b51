"""Tell what a file holds by its beginning, where its name does not say."""

from typing import Literal

from tokenfeed.tools.corpus.blocks import READ_ERRORS, Blocks, Compression
from tokenfeed.tools.corpus.json_lines import is_json_lines, is_json_list

__all__ = ["holds_objects", "is_binary", "json_format"]

_SNIFFED_BYTES, _LONGEST_SNIFFED_BYTES = 1 << 16, 1 << 25
"""How much is read to know what a file is; the more where its first record may not have ended."""
_NUL_BYTES = 8192


def is_binary(path: str, compression: Compression | None) -> bool:
    """Whether the (decompressed) beginning holds a NUL."""
    return b"\0" in _beginning(path, compression, _NUL_BYTES)[:_NUL_BYTES]


def json_format(
    path: str, compression: Compression | None, field: str
) -> Literal["jsonl", "json", "text"]:
    """What JSON a file holds: records by line, a list of records, or just some text.

    Records are only what has `field`: the .json files of a source tree are texts.
    """
    for num_bytes in (_SNIFFED_BYTES, _LONGEST_SNIFFED_BYTES):
        beginning = _beginning(path, compression, num_bytes)
        if is_json_lines(beginning, field):
            return "jsonl"
        if is_json_list(beginning, field):
            return "json"
        if len(beginning) < num_bytes:
            break
    return "text"


def holds_objects(path: str, compression: Compression | None) -> bool:
    """Whether it looks like records, whatever their fields."""
    beginning = _beginning(path, compression, _SNIFFED_BYTES)
    return is_json_lines(beginning, None) or is_json_list(beginning, None)


def _beginning(path: str, compression: Compression | None, num_bytes: int) -> bytes:
    """About the first `num_bytes`, decompressed. What cannot be read is rejected later."""
    beginning = b""
    try:
        for block in Blocks(path, compression, 0, None if compression else num_bytes):
            beginning += block
            if len(beginning) >= num_bytes:
                break
    except READ_ERRORS:
        pass
    return beginning
