"""Read CSV and TSV with the `csv` module. Rows that it cannot read are rejected, with their lines.

Values of a CSV may be quoted and then contain newlines; a TSV has no quotes. A row is read strictly
first: text behind a closing quote is an error. If such a row is one line, it is read as `csv` reads
it by default. If it has several lines, a quote was probably not closed, so the row is rejected up
to this line. The next line begins a new row.
"""

import codecs
import csv
import io
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal, Self

import numpy as np
import pyarrow as pa

from tokenfeed.pipeline.arithmetic import binaries
from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus.blocks import BlockFile
from tokenfeed.tools.corpus.formats.tables import batch_records, column_problem
from tokenfeed.tools.corpus.input_files import FilePart, Format
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
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1 << 12, 1 << 18
"""Rows and bytes that become records together."""
LONGEST_ROW_BYTES = 1 << 24
"""Bytes of the longest row that is read to be rejected, if `--max-record` is not larger. A longer
row ends the file."""


_QUOTED = re.compile(rb'(?:^|\t)"(?:[^"\t\r\n]|"")*""(?:[^"\t\r\n]|"")*"(?:\t|\r?$)', re.MULTILINE)
"""Matches a value of a TSV as programs write it that quote values and double their quotes."""


def has_quoted_values(beginning: bytes) -> bool:
    """Return whether the beginning of a TSV has values whose quotes a reader should remove."""
    return _QUOTED.search(beginning) is not None


class _Rows:
    """The rows of a file. As an iterator, it yields the lines that `csv` asks for."""

    def __init__(self, blocks: Iterable[bytes], delimiter: str, most_bytes: int) -> None:
        file = io.TextIOWrapper(io.BufferedReader(BlockFile(blocks)), _BYTES_AS_TEXT, newline="")
        self._most_bytes = most_bytes
        self._limit = max(most_bytes, LONGEST_ROW_BYTES)
        self._next_line = file.readline
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
        self._parse = partial(csv.reader, delimiter=delimiter, quoting=quoting)
        self._strict = self._parse(self, strict=True)
        csv.field_size_limit(sys.maxsize)
        self.num_bytes = 0
        """Bytes of the row, with its newlines."""
        self._first = self._last = 0
        """Numbers of the first and the latest line of the row."""
        self._line = ""
        """The latest line."""
        self._has_ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        """Return the next line. `csv` asks for a second line of a row within a quoted value.

        Raises:
            ValueError: The row is so long that it should not be in memory. The file ends there.
        """
        line = self._next_line(self._limit + 1)
        if not self._last:
            line = line.removeprefix(codecs.BOM_UTF8.decode(_BYTES_AS_TEXT))
        if not line:
            self._has_ended = True
            raise StopIteration
        self._line = line
        self.num_bytes += len(line)
        self._last += 1
        if self.num_bytes > self._limit:
            raise ValueError(
                f"the row that begins in line {self._first} has more than {self._limit:,} bytes"
            )
        return line

    def read(self) -> list[str] | Unusable | None:
        """Return the values of the next row that is not blank, or why it has none, or None at the
        end of the file. The lines of a row that cannot be read are skipped."""
        values: list[str] | None = []
        while values == []:
            self._first, self.num_bytes, reason = self._last + 1, 0, ""
            try:
                values = next(self._strict, None)
            except csv.Error:
                values, reason = self._sloppy()
            num_bytes = self.num_bytes - len(self._line) + len(self._line.rstrip("\r\n"))
            if num_bytes > self._most_bytes:
                reason = f"the row {too_long(num_bytes, self._most_bytes)}"
            if reason:
                lines = f"lines {self._first} to {self._last} are lost; is a quote not closed?"
                if self._first == self._last:
                    lines = f"line {self._first} is lost"
                return Unusable(f"{reason}: {lines}")
        return values

    def _sloppy(self) -> tuple[list[str], str]:
        """Return the values of a row with text behind a closing quote, or why it has none."""
        if self._has_ended:
            return [], "a quoted value never ends"
        if self._first == self._last:
            reader = self._parse([self._line, ""])
            values = next(reader)
            if reader.line_num == 1:
                return values, ""
        return [], "a quoted value spans lines and goes on behind its closing quote"


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
    blocks, consumed = part.text_blocks(), 0
    rows = _Rows(blocks, delimiter, part.source.max_record_bytes)
    header = rows.read()
    if header is None:
        raise ValueError("Empty CSV or TSV: its first line must name the columns")
    if isinstance(header, Unusable):
        yield rejected(0, fields, f"the header cannot be read: {header}")
        return
    columns = [_bytes(value).decode(errors="replace") for value in header]
    schema = pa.schema([(column, pa.large_binary()) for column in columns])
    if problem := column_problem(schema, fields):
        other = next((each for each in ";\t|" if len(columns) == 1 and each in columns[0]), "")
        if other:
            problem = (
                f"has one column, {columns[0][:80]!r}: separate values by commas, not {other!r}"
            )
        yield rejected(0, fields, problem)
        return
    for records in _records(rows, columns, fields):
        yield replace(records, weight_bytes=part.weight_of(blocks.consumed_bytes - consumed))
        consumed = blocks.consumed_bytes


def _records(rows: _Rows, columns: list[str], fields: Fields) -> Iterator[Records]:
    """Yield the rows as records, many at a time."""
    found: list[list[str] | Unusable] = []
    first = num_bytes = 0
    while True:
        try:
            row = rows.read()
        except ValueError:
            yield _as_records(first, found, columns, fields)
            raise
        if row is None:
            break
        if isinstance(row, list) and len(row) != len(columns):
            row = Unusable(f"has {len(row)} values, expected {len(columns)}")
        found.append(row)
        num_bytes += rows.num_bytes
        if num_bytes > _BYTES_AT_ONCE or len(found) == _ROWS_AT_ONCE:
            yield _as_records(first, found, columns, fields)
            first, num_bytes, found = first + len(found), 0, []
    yield _as_records(first, found, columns, fields)


def _as_records(
    first: int, rows: list[list[str] | Unusable], columns: list[str], fields: Fields
) -> Records:
    """Return the records of rows, of which the first has the number `first`."""
    good = [(number, row) for number, row in enumerate(rows, first) if isinstance(row, list)]
    names = [name for name in fields if name in columns]
    values = [binaries([_bytes(row[columns.index(name)]) for _, row in good]) for name in names]
    numbers = np.array([number for number, _ in good], np.uint64)
    records = batch_records(pa.RecordBatch.from_arrays(values, names), fields, numbers)
    for number, row in enumerate(rows, first):
        if isinstance(row, Unusable):
            records.rejects.append(Reject(number, str(row)))
    return records


def _bytes(value: str) -> bytes:
    return value.encode(_BYTES_AS_TEXT)


def _format(name: str, delimiter: str) -> Format:
    return Format(
        name=name,
        endings=(f".{name}",),
        read=partial(_read, delimiter=delimiter),
        is_text=True,
    )


CSV, TSV = _format("csv", ","), _format("tsv", "\t")
