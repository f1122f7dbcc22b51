"""Detect the format of a file by the ending of its name, or else by its content.

A file in a folder with an unknown ending is a text, because a source tree has all kinds of names. A
file with an unknown ending that the command line names is read as records if it contains records. A
.json file is a text only if it does not begin with records: with a wrong field name, records must
be rejected, and raw JSON must not become training text.
"""

import logging
import os

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus.blocks import READ_ERRORS, Blocks, Compression
from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.registry import FALLBACK, FORMATS
from tokenfeed.tools.corpus.input_files import STANDARD_INPUT
from tokenfeed.tools.corpus.locations import Location

logger = logging.getLogger(__name__)

_COMPRESSIONS: dict[str, Compression] = {
    ".gz": "gz",
    ".zst": "zst",
    ".zstd": "zst",
    ".bz2": "bz2",
    ".xz": "xz",
}
_ARCHIVES = {".tar", ".tgz", ".zip", ".7z"}
_SNIFFED_BYTES, _LONGEST_SNIFFED_BYTES = 1 << 16, 1 << 25
"""Bytes that are read to detect a format. The larger number is for long first records."""
_NUL_BYTES = 8192


def compression_of(name: str) -> Compression | None:
    """Return the compression of a file by the last ending of its name."""
    return _COMPRESSIONS.get(os.path.splitext(name.lower())[1])


def needs_look(name: str) -> bool:
    """Return whether the content decides the format of a file, or the name says text."""
    format_ = _by_ending(name)
    return format_ is None or format_ is FALLBACK or format_.is_vague


def format_in_folder(name: str, path: Location, field: str) -> Format:
    """Return the format of a file in a folder; text for an unknown ending.

    Args:
        name: Name of the file.
        path: The place to read the file, if the name does not decide.
        field: A field that the records of the corpus have.
    """
    format_ = _by_ending(name)
    if format_ and format_.is_vague:
        return _by_content(path, compression_of(name), field)
    return format_ or FALLBACK


def format_of_given(name: str, path: Location, field: str) -> Format:
    """Return the format of standard input, or of a file that the command line names.

    For an unknown ending, the content decides. See `format_in_folder` for the arguments.

    Raises:
        CorpusError: The name says text, but the file contains records.
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
    """Return whether the decompressed beginning contains a NUL, as in UTF-16."""
    return b"\0" in _beginning(path, compression, _NUL_BYTES)[:_NUL_BYTES]


def is_archive(name: str, path: Location) -> bool:
    """Return whether a file is an archive, by its content and by an ending that no format has."""
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
    """Return the format of the records at the start of the file; text for other content."""
    for num_bytes in (_SNIFFED_BYTES, _LONGEST_SNIFFED_BYTES):
        beginning = _beginning(path, compression, num_bytes)
        for format_ in FORMATS.values():
            if format_.begins and format_.begins(beginning, field):
                return format_
        if len(beginning) < num_bytes:
            break
    return FALLBACK


def _beginning(path: Location, compression: Compression | None, num_bytes: int) -> bytes:
    """Return about the first `num_bytes`, decompressed. Read errors are reported later."""
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
    """Return the last ending of a name, or the ending before `.gz` and other compressions."""
    stem, ending = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if ending in _COMPRESSIONS else ending
