"""Which format a file has: by the ending of its name, and where that says nothing, by its content.

A file in a folder whose ending is of no known format is a text: a source tree has all kinds of
names. One that was given by name may hold records all the same, and then is read as such; but a
.txt is a text, and a warning says so where it looks like more.
"""

import logging
import os

from tokenfeed.tools.corpus.blocks import READ_ERRORS, Blocks, Compression
from tokenfeed.tools.corpus.formats.format import Format
from tokenfeed.tools.corpus.formats.registry import FALLBACK, FORMATS
from tokenfeed.tools.corpus.places import Place
from tokenfeed.tools.corpus.stdin import STANDARD_INPUT

__all__ = ["compression_of", "format_in_folder", "format_of_given", "is_archive", "is_binary"]

logger = logging.getLogger(__name__)

_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}
_ARCHIVES = {".tar", ".tgz", ".zip", ".7z"}
_SNIFFED_BYTES, _LONGEST_SNIFFED_BYTES = 1 << 16, 1 << 25
"""Bytes read to tell what a file is; the larger number where its first record may be longer."""
_NUL_BYTES = 8192


def compression_of(name: str) -> Compression | None:
    """What a file is compressed by, as the last ending of its name says."""
    return _COMPRESSIONS.get(os.path.splitext(name.lower())[1])


def format_in_folder(name: str, path: Place, field: str) -> Format:
    """The format of a file found in a folder; text for an unknown ending.

    Args:
        name: The file's, whose ending counts.
        path: Where it is read, if the ending says too little.
        field: What records of the corpus have.
    """
    format_ = _by_ending(name)
    if format_ and format_.is_vague:
        return _by_content(path, compression_of(name), field)
    return format_ or FALLBACK


def format_of_given(name: str, path: Place, field: str) -> Format:
    """The format of a file given by name, or of standard input: by its content where its ending
    says none. For the arguments see `format_in_folder`."""
    format_ = format_in_folder(name, path, field)
    if format_ is not FALLBACK:
        return format_
    compression = compression_of(name)
    found = _by_content(path, compression, field)
    if found is FALLBACK:
        if _begins_any(_beginning(path, compression, _SNIFFED_BYTES), None):
            logger.warning("%s: its records have no field `%s`: read as one text", name, field)
    elif _by_ending(name) is FALLBACK:
        logger.warning(
            "%s: read as one text, though it holds records with a field `%s`; to have them read, "
            "let its name end in %s",
            *(name, field, found.endings[0]),
        )
        return FALLBACK
    elif name != STANDARD_INPUT:
        logger.info("%s: read as %s, for it holds such records", name, found.endings[0])
    return found


def is_binary(path: Place, compression: Compression | None) -> bool:
    """Whether the (decompressed) beginning holds a NUL."""
    return b"\0" in _beginning(path, compression, _NUL_BYTES)[:_NUL_BYTES]


def is_archive(name: str, path: Place) -> bool:
    """Whether a file holds other files, by what it holds and by an ending that no format has."""
    is_named_so = _ending(name) in _ARCHIVES and _by_ending(name) is None
    return is_named_so and is_binary(path, compression_of(name))


def _by_ending(name: str) -> Format | None:
    ending, is_compressed = _ending(name), compression_of(name) is not None
    for format_ in FORMATS.values():
        if ending in format_.endings and (format_.is_compressible or not is_compressed):
            return format_
    return None


def _by_content(path: Place, compression: Compression | None, field: str) -> Format:
    """The format whose records begin a file and have `field`; else it is just some text."""
    for num_bytes in (_SNIFFED_BYTES, _LONGEST_SNIFFED_BYTES):
        beginning = _beginning(path, compression, num_bytes)
        if found := _begins_any(beginning, field):
            return found
        if len(beginning) < num_bytes:
            break
    return FALLBACK


def _begins_any(beginning: bytes, field: str | None) -> Format | None:
    for format_ in FORMATS.values():
        if format_.begins and format_.begins(beginning, field):
            return format_
    return None


def _beginning(path: Place, compression: Compression | None, num_bytes: int) -> bytes:
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


def _ending(name: str) -> str:
    """The ending of a name that says the format: the last, or the one before a compression's."""
    stem, ending = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if ending in _COMPRESSIONS else ending
