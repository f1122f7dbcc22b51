"""Read CSV and TSV with the `csv` module. Rows that it cannot read are rejected, with their lines.

Values of a CSV may be quoted and then contain newlines; a TSV has no quotes. A row is read strictly
first: text behind a closing quote is an error. If such a row is one line, it is read as `csv` reads
it by default. If it has several lines, a quote was probably not closed, so the row is rejected. The
next line begins a new row.
"""

import codecs
import csv
import io
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal, Self

import numpy as np
import pyarrow as pa

from tokenfeed.pipeline.arithmetic import binaries
from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus.blocks import IS_UTF16, READ_ERRORS, UTF16_MARKS, BlockFile
from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.tables import batch_records, column_problem
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.records import (
    Fields,
    Records,
    Reject,
    Unusable,
    rejected,
    too_long,
)

_BYTES_AS_TEXT = "latin-1"
"""Decodes each byte to one character and back, whether or not the bytes are UTF-8."""
_NEWLINES = ("\n", "\r")
_MANY_LINES = 100
"""A row of more lines gets a warning, because it may contain other rows."""
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1 << 12, 1 << 18
"""Rows and bytes that become records together."""


class _BadRow(Exception):
    """Why a row cannot be read."""


class _Lines:
    """The lines of a file, as `csv` asks for them, and those of the current row."""

    def __init__(self, blocks: Iterable[bytes], most_bytes: int, *, is_quoted: bool) -> None:
        """
        Args:
            blocks: The bytes of the file.
            most_bytes: Lines of a longer row are dropped while they are read.
            is_quoted: Whether values may be quoted.
        """
        raw = io.BufferedReader(BlockFile(blocks))
        file = io.TextIOWrapper(raw, _BYTES_AS_TEXT, newline="")
        self._limit = most_bytes + len("\r\n")
        self._read = partial(file.readline, self._limit)
        self._most_bytes, self._is_quoted = most_bytes, is_quoted
        self._is_first, self._num_dropped = True, 0
        self.beginning = b""
        """The first bytes of the file."""
        self.row: list[str] = []
        """The lines of the row."""
        self.first = 1
        """Number of the first line of the row."""
        self.num_bytes = 0
        """Bytes of the row, with its newlines."""
        self.has_ended = False

    @property
    def last(self) -> int:
        """Number of the last line of the row."""
        return self.first + len(self.row) + self._num_dropped - 1

    def begin_row(self) -> None:
        """Begin a new row with the next line."""
        self.first += len(self.row) + self._num_dropped
        self.row, self.num_bytes, self._num_dropped = [], 0, 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        """Return the next line. `csv` asks for a second line of a row within a quoted value.

        Raises:
            _BadRow: The row is too long.
        """
        line = self._read()
        if self._is_first:
            self._is_first, self.beginning = False, line[:4].encode(_BYTES_AS_TEXT)
            line = line.removeprefix(codecs.BOM_UTF8.decode(_BYTES_AS_TEXT))
        if not line:
            self.has_ended = True
            raise StopIteration
        self.num_bytes += len(line)
        if len(line) == self._limit or self.num_bytes > 2 * self._limit:
            self._drop(line)
        self.row.append(line)
        return line

    def check_length(self, latest: str) -> None:
        """Check the length of the row without its last newline, given its latest line.

        Raises:
            _BadRow: The row is too long.
        """
        num_bytes = self.num_bytes - (len(latest) - len(latest.rstrip("\r\n")))
        if num_bytes > self._most_bytes:
            raise _BadRow(f"the row {too_long(num_bytes, self._most_bytes)}")

    def _drop(self, line: str) -> None:
        """Read a row that is too long to its end, and raise `_BadRow`.

        Args:
            line: Its latest line, or a part of that line.
        """
        is_open = bool(self.row)
        self._num_dropped += 1
        while line:
            latest = line
            is_open ^= self._is_quoted and line.count('"') % 2 == 1
            if not is_open and line.endswith(_NEWLINES):
                break
            line = self._read()
            self._num_dropped += latest.endswith(_NEWLINES) and bool(line)
            self.num_bytes += len(line)
        self.check_length(latest)


class _Rows:
    """The rows of a file."""

    def __init__(self, blocks: Iterable[bytes], delimiter: str, most_bytes: int) -> None:
        is_quoted = delimiter == ","
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
        self._parse = partial(csv.reader, delimiter=delimiter, quoting=quoting)
        self.lines = _Lines(blocks, most_bytes, is_quoted=is_quoted)
        self._strict = self._parse(self.lines, strict=True)
        self._most_bytes = most_bytes
        self._has_warned = False
        csv.field_size_limit(sys.maxsize)  # `_Lines` bounds rows

    def read(self) -> list[str] | None:
        """Return the values of the next row that is not blank; None at the end of the file.

        Raises:
            _BadRow: The row cannot be read. Its lines are skipped.
        """
        lines = self.lines
        try:
            while True:
                lines.begin_row()
                try:
                    values = next(self._strict, None)
                except csv.Error:
                    values = self._sloppy()
                if values != []:
                    break
            if values and lines.num_bytes > self._most_bytes:
                lines.check_length(lines.row[-1])
        except _BadRow as reason:
            raise _BadRow(f"{reason}: {self._lost}") from None
        return values

    def warning(self) -> str | None:
        """Return a warning if the latest row has very many lines; once per file."""
        if self._has_warned or len(self.lines.row) <= _MANY_LINES:
            return None
        self._has_warned = True
        return (
            f"one row is made of lines {self.lines.first} to {self.lines.last}, because a quoted "
            f"value has more than {_MANY_LINES} lines; is a quote not closed? (once per file)"
        )

    def _sloppy(self) -> list[str]:
        """Return the values of a row with text behind a closing quote."""
        values = next(self._parse(itertools.chain(self.lines.row[:], self.lines)))
        if self.lines.has_ended:
            raise _BadRow("a quoted value never ends")
        if len(self.lines.row) > 1:
            raise _BadRow("a quoted value spans lines and goes on behind its closing quote")
        return values

    @property
    def _lost(self) -> str:
        first, last = self.lines.first, self.lines.last
        if first == last:
            return f"line {first} is lost"
        return f"lines {first} to {last} are lost; is a quote not closed?"


def _read(part: FilePart, fields: Fields, delimiter: str) -> Iterator[Records]:
    """Read a file whose first line names its columns.

    Raises:
        CorpusError: A field is a list.
        ValueError: There is no header.
    """
    if any(kind.item for kind in fields.values()):
        raise CorpusError(
            f"{part.source.name}: `{'` and `'.join(fields)}` must hold lists, and CSV and TSV have "
            "none. Make it JSON Lines or Parquet, or leave it out by `--exclude`."
        )
    blocks, consumed = part.blocks(), 0
    rows = _Rows(blocks, delimiter, part.source.max_record_bytes)
    columns, problem = _columns(rows)
    schema = pa.schema([(column, pa.large_binary()) for column in columns])
    if problem := problem or column_problem(schema, fields):
        yield rejected(0, fields, problem)
        return
    for records in _records(rows, columns, fields):
        yield replace(records, weight_bytes=part.weight_of(blocks.consumed_bytes - consumed))
        consumed = blocks.consumed_bytes


def _columns(rows: _Rows) -> tuple[list[str], str | None]:
    """Read the names of the columns, or why the header cannot be read.

    Raises:
        ValueError: There is no header.
    """
    problem: str | None = None
    header: list[str] | None = []
    try:
        header = rows.read()
    except _BadRow as reason:
        problem = f"the header cannot be read: {reason}"
    if header is None:
        raise ValueError("Empty CSV or TSV: its first line must name the columns")
    if rows.lines.beginning.startswith(UTF16_MARKS):
        problem = IS_UTF16
    return [_bytes(value).decode(errors="replace") for value in header], problem


def _records(rows: _Rows, columns: list[str], fields: Fields) -> Iterator[Records]:
    """Yield the rows as records, many at a time; before a read error, those that were read."""
    found: list[list[str] | Unusable] = []
    first = num_bytes = 0
    try:
        while (row := _row(rows, len(columns))) is not None:
            found.append(row)
            num_bytes += rows.lines.num_bytes
            warning = rows.warning()
            if warning or num_bytes > _BYTES_AT_ONCE or len(found) == _ROWS_AT_ONCE:
                yield replace(_as_records(first, found, columns, fields), warning=warning)
                first, num_bytes, found = first + len(found), 0, []
    except READ_ERRORS:
        yield _as_records(first, found, columns, fields)
        raise
    yield _as_records(first, found, columns, fields)


def _row(rows: _Rows, num_columns: int) -> list[str] | Unusable | None:
    """Return the values of the next row, or why it has none; None at the end of the file."""
    try:
        values = rows.read()
    except _BadRow as reason:
        return Unusable(str(reason))
    if values is not None and len(values) != num_columns:
        return Unusable(f"has {len(values)} values, expected {num_columns}")
    return values


def _as_records(
    first: int, rows: list[list[str] | Unusable], columns: list[str], fields: Fields
) -> Records:
    """Return the records of rows, of which the first has the number `first`."""
    good = [(number, row) for number, row in enumerate(rows, first) if isinstance(row, list)]
    values = [binaries([_bytes(row[columns.index(name)]) for _, row in good]) for name in fields]
    numbers = np.array([number for number, _ in good], np.uint64)
    records = batch_records(pa.RecordBatch.from_arrays(values, list(fields)), fields, numbers)
    for number, row in enumerate(rows, first):
        if isinstance(row, Unusable):
            records.rejects.append(Reject(number, str(row)))
    return records


def _bytes(value: str) -> bytes:
    return value.encode(_BYTES_AS_TEXT)


CSV = Format(
    name="csv", endings=(".csv",), read=partial(_read, delimiter=","), is_compressible=True
)
TSV = Format(
    name="tsv", endings=(".tsv",), read=partial(_read, delimiter="\t"), is_compressible=True
)
