"""All formats, and which of them a file has. A new format is a file here, and a line of `FORMATS`.

The name of a file decides, or else its content. A file in a folder with an unknown ending is a
text, because a source tree has all kinds of names. A file with an unknown ending that the command
line names is read as records if it contains records. A .json file is a text only if it does not
begin with records: with a wrong field name, records must be rejected, and raw JSON must not become
training text.
"""

import codecs
import contextlib
import logging
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus.blocks import (
    COMPRESSIONS,
    LFS_POINTER,
    READ_ERRORS,
    Compression,
    TextBlocks,
    compression_of,
    is_wide,
)
from tokenfeed.tools.corpus.formats.arrow import ARROW
from tokenfeed.tools.corpus.formats.delimited import CSV, TSV
from tokenfeed.tools.corpus.formats.json_records import JSON_LINES, JSON_LIST
from tokenfeed.tools.corpus.formats.parquet import PARQUET
from tokenfeed.tools.corpus.formats.tokens import TOKENS
from tokenfeed.tools.corpus.input_files import STANDARD_INPUT, FilePart, Format
from tokenfeed.tools.corpus.locations import Location, size_of
from tokenfeed.tools.corpus.records import (
    FieldKind,
    Fields,
    Records,
    Unusable,
    checker,
    records_of,
    too_long,
)


def _read_text(part: FilePart, fields: Fields) -> Iterator[Records]:
    """Yield the whole file as the value of the first field with texts."""
    name = next((name for name, kind in fields.items() if kind is FieldKind.TEXT), "")
    yield records_of([(0, _text_row(part, name))], fields, part.weight_bytes)


def _text_row(part: FilePart, name: str) -> dict[str, bytes] | Unusable:
    pieces: list[bytes] = []
    num_bytes, most_bytes = 0, part.source.max_record_bytes
    for block in part.text_blocks():
        num_bytes += len(block)
        if num_bytes > most_bytes:
            pieces.clear()
        else:
            pieces.append(block)
    if num_bytes > most_bytes:
        return Unusable(f"the text {too_long(num_bytes, most_bytes)}")
    text = b"".join(pieces).removeprefix(codecs.BOM_UTF8)
    try:
        return {name: checker(FieldKind.TEXT)(text)}
    except Unusable as reason:
        return Unusable(f"the text {reason}")


TEXT = Format(name="text", endings=(".txt",), read=_read_text, is_text=True)


FALLBACK = TEXT
"""What a file is whose name and content say nothing else."""


FORMATS: dict[str, Format] = {
    format_.name: format_
    for format_ in (TEXT, JSON_LINES, JSON_LIST, CSV, TSV, PARQUET, ARROW, TOKENS)
}
"""Contents are compared with them in this order."""


logger = logging.getLogger(__name__)


class Unread(NamedTuple):
    """A kind of files that no format reads."""

    one: str
    """A file of the kind, in words."""
    many: str
    remedy: str
    """What to do with such files."""

    @property
    def reason(self) -> str:
        """Why a file is left out, and what to do."""
        return f"is {self.one}, which is not read: {self.remedy}"


_BY_PANDOC = "convert it, like `pandoc -t plain FILE -o FILE.txt`"
_ARCHIVE = Unread("an archive", "archives", "unpack it")
_WORD = Unread("a document of a word processor", "documents of word processors", _BY_PANDOC)
_INDEX = Unread(
    "an index of token ids",
    "indexes of token ids",
    "put it beside its file, and `--task ids` reads both",
)
_MASK = Unread(
    "a loss mask of datatrove",
    "loss masks of datatrove",
    "give rows with a `loss_mask` by tokenfeed.pretokenize, or train on all tokens",
)
_UNREAD = {
    **dict.fromkeys((".tar", ".tgz", ".zip", ".7z", ".rar"), _ARCHIVE),
    **dict.fromkeys((".docx", ".odt"), _WORD),
    ".epub": Unread("an e-book", "e-books", _BY_PANDOC),
    ".pdf": Unread("a PDF", "PDFs", "convert it, like `pdftotext FILE`"),
    ".warc": Unread("an archive of web pages", "archives of web pages", "extract the texts"),
    **dict.fromkeys((".idx", ".ds.index", ".ds.metadata"), _INDEX),
    ".ds.loss": _MASK,
}
"""By the last ending of a name, or by the last two."""
BESIDE_IDS = (".idx", ".ds.index", ".ds.metadata", ".ds.loss")
"""Endings of files that belong to files of token ids."""
BINARY = Unread("a binary file", "binary files", "if it is text, name its --encoding")
NO_FILE = Unread(
    "a named pipe, socket or device",
    "named pipes, sockets and devices",
    "write its content to a file, or give `-` and the content as standard input",
)
BROKEN_LINK = Unread("a broken link", "broken links", "copy the files that they name")
_NEVER_TEXT = {".pdf", ".warc"}
"""Endings of files that may look like text."""
_SNIFFED_BYTES, _LONGEST_SNIFFED_BYTES = 1 << 16, 1 << 25
"""Bytes that are read to detect a format. The larger number is for long first records."""
_NUL_BYTES = 8192
_LONGEST_POINTER_BYTES = 1023
"""By the specification of Git LFS."""


def needs_look(name: str) -> bool:
    """Return whether the content decides the format of a file, or the name says text."""
    format_ = _by_ending(name)
    return format_ is None or format_ is FALLBACK or format_.is_vague


def format_in_folder(
    name: str, path: Location, field: str, encoding: str | None = None
) -> Format | None:
    """Return the format of a file in a folder: text for an unknown ending; None if no format reads
    the file.

    Without an ending, the content decides: Hadoop and Spark name parts so.

    Args:
        name: Name of the file.
        path: The place to read the file, if the name does not decide.
        field: A field that the records of the corpus have.
        encoding: The encoding of text that is not UTF-8.
    """
    if unread_kind(name):
        return None
    found = _by_name(name, path, field, encoding)
    if found is FALLBACK and _is_binary(name, path, encoding):
        return None
    if _by_ending(name) is None and is_pointer(path):
        return None  # most likely of a picture or a model
    return found


def format_of_given(name: str, path: Location, field: str, encoding: str | None = None) -> Format:
    """Return the format of standard input, or of a file that the command line names.

    For an unknown ending, the content decides. See `format_in_folder` for the arguments.

    Raises:
        CorpusError: No format reads the file. Or the name says text, but the file has records.
    """
    format_ = _by_ending(name)
    if format_ is not None and format_ is not FALLBACK:
        return _by_name(name, path, field, encoding)
    found = _by_content(name, path, field, encoding)
    if format_ is FALLBACK and found is not FALLBACK:
        raise CorpusError(
            f"{name}: the name says text, but the file holds records. Rename it to end in "
            f"{found.endings[0]}. To read it as one text, give a folder that holds it."
        )
    if found is not FALLBACK and name != STANDARD_INPUT:
        logger.info("%s: read as %s because it holds such records", name, found.endings[0])
    return found


def refuse_unread(name: str, path: Location) -> None:
    """Raise CorpusError if no format reads a file that the command line names."""
    kind = unread_kind(name)
    if kind and (ending_of(name) in _NEVER_TEXT or _is_binary(name, path)):
        raise CorpusError(f"{name}: {kind.reason}.")


def is_pointer(path: Location) -> bool:
    """Return whether a file is a pointer of Git LFS, in place of the file itself. Read errors are
    reported later."""
    is_small = False
    with contextlib.suppress(OSError):
        is_small = isinstance(path, str) and size_of(path) <= _LONGEST_POINTER_BYTES
    return is_small and beginning_of(path, None, len(LFS_POINTER)) == LFS_POINTER


def unread_kind(name: str) -> Unread | None:
    """Return the kind of files that no format reads, by the ending of a name; else None."""
    stem, last = os.path.splitext(name.lower())
    last_two = os.path.splitext(stem)[1] + last
    kind = _UNREAD.get(ending_of(name)) or _UNREAD.get(last_two)
    return kind if kind and _by_ending(name) is None else None


def _is_binary(name: str, path: Location, encoding: str | None = None) -> bool:
    """Return whether the decompressed beginning contains a NUL, as text."""
    if encoding and not is_wide(encoding):  # its text has no NUL, and other bytes may not decode
        encoding = None
    return b"\0" in beginning_of(path, compression_of(name), _NUL_BYTES, encoding)[:_NUL_BYTES]


def _by_name(name: str, path: Location, field: str, encoding: str | None) -> Format:
    """Return the format by the ending of the name; by the content if the ending may be several."""
    format_ = _by_ending(name)
    if ending_of(name) != "" and not (format_ and format_.is_vague):
        return format_ or FALLBACK
    found = _by_content(name, path, field, encoding)
    if found is FALLBACK and format_:
        _warn_of_records_inside(name, path, field)
    return found


def _by_ending(name: str) -> Format | None:
    ending, is_compressed = ending_of(name), compression_of(name) is not None
    for format_ in FORMATS.values():
        if ending in format_.endings and (format_.is_text or not is_compressed):
            return format_
    return None


def _by_content(name: str, path: Location, field: str, encoding: str | None) -> Format:
    """Return the format of the records at the start of the file; text for other content."""
    compression = compression_of(name)
    for num_bytes in (_SNIFFED_BYTES, _LONGEST_SNIFFED_BYTES):
        beginning = beginning_of(path, compression, num_bytes, encoding)
        for format_ in FORMATS.values():
            if compression and not format_.is_text:
                continue
            if format_.begins and format_.begins(beginning, field):
                return format_
        may_be_json = beginning.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"["))
        if len(beginning) < num_bytes or not may_be_json:
            break
    return FALLBACK


def _warn_of_records_inside(name: str, path: Location, field: str) -> None:
    """Warn of a JSON object with a list of records, which is read as a text."""
    text = beginning_of(path, compression_of(name), _SNIFFED_BYTES).decode(errors="replace")
    inside = rf'"([^"]+)"\s*:\s*\[\s*{{[^{{}}\[\]]*"{re.escape(field)}"\s*:'
    if text.lstrip().startswith("{") and (found := re.search(inside, text)):
        logger.warning(
            "%s: is read as one text, but its list `%s` has records with the field `%s`. To read "
            "them, make JSON Lines of the list: jq -c '.[\"%s\"][]' FILE",
            *(name, found[1], field, found[1]),
        )


def beginning_of(
    path: Location, compression: Compression | None, num_bytes: int, encoding: str | None = None
) -> bytes:
    """Return about the first `num_bytes`, decompressed and as UTF-8. Read errors are reported
    later."""
    beginning = b""
    try:
        stop = None if compression else num_bytes
        for block in TextBlocks(path, compression, 0, stop, encoding, num_bytes):
            beginning += block
            if len(beginning) >= num_bytes:
                break
    except (*READ_ERRORS, UnicodeError):
        pass
    return beginning


def ending_of(name: str) -> str:
    """Return the last ending of a name, or the ending before `.gz` and other compressions."""
    stem, ending = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if ending in COMPRESSIONS else ending
