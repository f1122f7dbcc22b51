"""Read the documents of a part, one after the other, and turn what is unusable into rejects.

A record is a text file, a line of .jsonl or a row of Parquet. A bad one costs itself only; a
damaged file costs what follows the damage and gives one reject there. Blank lines of a .jsonl are
no records, but keep their number, so that a record's number is its line's.
"""

import codecs
import json
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tokenfeed.tools.blocks import READ_ERRORS, read_blocks, split_lines
from tokenfeed.tools.units import Part, parquet_problem

__all__ = ["Document", "Reject", "read_records"]

_PARQUET_ROWS = 512


class Document(NamedTuple):
    """A text, in both forms that are needed: to encode, and to count and hash."""

    record: int
    text: str
    utf8: bytes


class Reject(NamedTuple):
    """A record that could not be used."""

    record: int
    reason: str


def read_records(part: Part, text_field: str) -> Iterator[Document | Reject]:
    """Read every record of `part`.

    Raises:
        CorpusError: The file has vanished or changed since the corpus was listed.
    """
    part.source.check_unchanged()
    if part.source.kind == "jsonl":
        return _read_json_lines(part, text_field)
    if part.source.kind == "parquet":
        return _read_parquet(part, text_field)
    return _read_text(part)


def _read_text(part: Part) -> Iterator[Document | Reject]:
    try:
        utf8 = b"".join(read_blocks(part.source.path, part.source.compression))
    except READ_ERRORS as error:
        yield _damaged(0, error)
    else:
        yield _document(0, utf8)


def _read_json_lines(part: Part, text_field: str) -> Iterator[Document | Reject]:
    record = part.first_record
    source = part.source
    try:
        blocks = read_blocks(source.path, source.compression, part.start, part.stop)
        for line in split_lines(blocks):
            if line and not line.isspace():
                yield _json_document(record, line, text_field)
            record += 1
    except READ_ERRORS as error:
        yield _damaged(record, error)


def _json_document(record: int, line: bytes, text_field: str) -> Document | Reject:
    if record == 0:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Reject(record, f"invalid UTF-8 at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Reject(record, f"not JSON: {error}")
    if not isinstance(value, dict):
        return Reject(record, f"expected a JSON object, got {type(value).__name__}")
    if text_field not in value:
        return Reject(record, f"no field `{text_field}`")
    text = value[text_field]
    if not isinstance(text, str):
        return Reject(record, f"field `{text_field}` is {type(text).__name__}, expected text")
    try:
        return Document(record, text, text.encode())
    except UnicodeEncodeError as error:
        return Reject(record, f"lone surrogate at character {error.start}: no UTF-8 can express it")


def _read_parquet(part: Part, text_field: str) -> Iterator[Document | Reject]:
    record = part.first_record
    try:
        with pq.ParquetFile(part.source.path) as file:
            if problem := parquet_problem(file.schema_arrow, text_field):
                yield Reject(record, problem)
                return
            stop = file.num_row_groups if part.stop is None else part.stop
            groups = list(range(part.start, stop))
            for batch in file.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=[text_field]):
                # As bytes: one invalid text must not take the 511 others with it.
                texts = batch.column(0).cast(pa.large_string()).cast(pa.large_binary())
                for utf8 in texts.to_pylist():
                    yield Reject(record, "null") if utf8 is None else _document(record, utf8)
                    record += 1
    except (OSError, pa.ArrowException) as error:
        yield _damaged(record, error)


def _document(record: int, utf8: bytes) -> Document | Reject:
    try:
        return Document(record, utf8.decode(), utf8)
    except UnicodeDecodeError as error:
        return Reject(record, f"invalid UTF-8 at byte {error.start}")


def _damaged(record: int, error: Exception) -> Reject:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return Reject(record, f"cannot be read from here on: {' '.join(reason.split())}")
