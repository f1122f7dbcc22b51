"""Which format a file has: by the ending of its name, and where that says nothing, by its content.

A file in a folder with an unknown ending is a text, because a source tree has all kinds of names.
A file with an unknown ending that was given by name is read as records if it holds records. A .json
file is a text only if it does not begin with records: a wrong field name must give rejects, never
raw JSON as training text.
"""

import logging
import os

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus.blocks import READ_ERRORS, UTF16_MARKS, Blocks, Compression
from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.registry import FALLBACK, FORMATS
from tokenfeed.tools.corpus.input_files import STANDARD_INPUT
from tokenfeed.tools.corpus.locations import Location

__all__ = [
    "compression_of",
    "format_in_folder",
    "format_of_given",
    "is_archive",
    "is_binary",
    "needs_look",
]

logger = logging.getLogger(__name__)

_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}
_ARCHIVES = {".tar", ".tgz", ".zip", ".7z"}
_SNIFFED_BYTES, _LONGEST_SNIFFED_BYTES = 1 << 16, 1 << 25
"""Bytes read to tell what a file is; the larger number where its first record may be longer."""
_NUL_BYTES = 8192


def compression_of(name: str) -> Compression | None:
    """What a file is compressed by, as the last ending of its name says."""
    return _COMPRESSIONS.get(os.path.splitext(name.lower())[1])


def needs_look(name: str) -> bool:
    """Return whether the content of a file decides its format, or its name says text."""
    format_ = _by_ending(name)
    return format_ is None or format_ is FALLBACK or format_.is_vague


def format_in_folder(name: str, path: Location, field: str) -> Format:
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


def format_of_given(name: str, path: Location, field: str) -> Format:
    """The format of a file given by name, or of standard input. An unknown ending is resolved by
    content. For the arguments see `format_in_folder`.

    Raises:
        CorpusError: The name says text, and the content is records.
    """
    format_ = _by_ending(name)
    if format_ is None or format_ is FALLBACK:
        found = _by_content(path, compression_of(name), field)
        if format_ is FALLBACK and found is not FALLBACK:
            raise CorpusError(
                f"{name}: the name says text, but the file holds records. Rename it to end in "
                f"{found.endings[0]}. To read it as one text, give a folder that holds it."
            )
        if found is not FALLBACK and name != STANDARD_INPUT:
            logger.info("%s: read as %s because it holds such records", name, found.endings[0])
        return found
    return format_in_folder(name, path, field)


def is_binary(path: Location, compression: Compression | None) -> bool:
    """Whether the (decompressed) beginning holds a NUL and is not UTF-16, which is rejected with a
    reason instead."""
    beginning = _beginning(path, compression, _NUL_BYTES)[:_NUL_BYTES]
    return b"\0" in beginning and not beginning.startswith(UTF16_MARKS)


def is_archive(name: str, path: Location) -> bool:
    """Whether a file holds other files, by what it holds and by an ending that no format has."""
    is_named_so = _ending(name) in _ARCHIVES and _by_ending(name) is None
    return is_named_so and is_binary(path, compression_of(name))


def _by_ending(name: str) -> Format | None:
    ending, is_compressed = _ending(name), compression_of(name) is not None
    for format_ in FORMATS.values():
        if ending in format_.endings and (format_.is_compressible or not is_compressed):
            return format_
    try:
        return FORMATS[ending]  # of an installed package
    except KeyError:
        return None


def _by_content(path: Location, compression: Compression | None, field: str) -> Format:
    """The format whose records begin the file; without records the file is a text."""
    for num_bytes in (_SNIFFED_BYTES, _LONGEST_SNIFFED_BYTES):
        beginning = _beginning(path, compression, num_bytes)
        for format_ in FORMATS.values():
            if format_.begins and format_.begins(beginning, field):
                return format_
        if len(beginning) < num_bytes:
            break
    return FALLBACK


def _beginning(path: Location, compression: Compression | None, num_bytes: int) -> bytes:
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
