"""Which format a file has: by the ending of its name, and where that says nothing, by its content.

A file in a folder whose ending is of no known format is a text: a source tree has all kinds of
names. One that was given by name may hold records all the same, and then is read as such; but a
.txt is a text, and a warning says so where it looks like more.
"""

import logging
import os
from typing import Literal

from tokenfeed.tools.corpus.blocks import Compression
from tokenfeed.tools.corpus.sniff import holds_objects, is_binary, json_format

__all__ = ["Format", "format_by_content", "format_by_name", "is_archive"]

logger = logging.getLogger(__name__)

Format = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]

_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}
_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".ldjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_TEXT = ".txt"
_ARCHIVES = {".tar", ".tgz", ".zip", ".7z"}


def format_by_name(name: str) -> tuple[Format, Compression | None]:
    """The format and the compression that a name's endings say; text for an ending unknown."""
    ending, compression = _endings(name)
    format_ = _FORMATS.get(ending, "text")
    if format_ in ("parquet", "arrow") and compression:
        return "text", compression
    return format_, compression


def format_by_content(name: str, path: str, field: str) -> Format:
    """The format of a file given by name, or of standard input, where its ending says none.

    Args:
        name: The file's, whose ending counts.
        path: Where it is read.
        field: What records of the corpus have.
    """
    ending, compression = _endings(name)
    found = json_format(path, compression, field)
    if found == "text":
        if holds_objects(path, compression):
            logger.warning("%s: its records have no field `%s`: read as one text", name, field)
    elif ending == _TEXT:
        logger.warning(
            "%s: read as one text, though it holds records with a field `%s`; to have them read, "
            "let its name end in .%s",
            *(name, field, found),
        )
        return "text"
    return found


def is_archive(path: str) -> bool:
    """Whether a file holds other files, by its ending and by what it holds."""
    ending, compression = _endings(path)
    return ending in _ARCHIVES and is_binary(path, compression)


def _endings(name: str) -> tuple[str, Compression | None]:
    """The ending that says the format, and what the file is compressed by."""
    stem, ending = os.path.splitext(name.lower())
    compression = _COMPRESSIONS.get(ending)
    return os.path.splitext(stem)[1] if compression else ending, compression
