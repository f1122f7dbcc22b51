"""Cut CSV and TSV behind whole rows, with care where a quote may not have been closed.

A quote that nobody closed makes one value of the lines behind it. So the quotes of a block are
looked at, all at once: if each opens a value, closes one or is half of a doubled one, the rows are
sound. If not, a slower pattern looks for the rows to be rejected: those whose quoted value spans
lines and goes on behind its closing quote, or never closes.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tokenfeed.tools.corpus.records import too_long

__all__ = ["DelimitedRows", "Lines", "QuotedRows", "whole_rows"]

_MANY_LINES = 100
"""A value of more lines gets a warning: it may have swallowed rows."""
_QUOTE, _NEWLINE, _RETURN = ord('"'), ord("\n"), ord("\r")
_NEWLINES = re.compile(rb"[\r\n]")


class DelimitedRows(NamedTuple):
    """Whole rows; or, with a reason, one row to be rejected."""

    data: bytes
    reason: str | None = None
    warning: str | None = None


class Lines:
    """Rows without quoting: each line is one."""

    _row = re.compile(rb"[\r\n]*+[^\r\n]++[\r\n]")

    def header_end(self, data: bytes) -> int:
        """The end of the first row that is not blank; 0 where it is not whole."""
        header = self._row.match(data)
        return header.end() if header else 0

    def cut(self, data: bytes, line: int) -> Iterator[DelimitedRows]:
        """The whole rows that `data` begins with; its first line has the number `line`."""
        if end := _behind_newline(data, 0, len(data)):
            yield DelimitedRows(data[:end])

    def unclosed(self, data: bytes, line: int) -> str:
        """Why `data`, the end of a file, is no whole row."""
        return "the last line is not whole"

    def is_open(self, row: bytes) -> bool:
        """Whether the beginning of a row ends within a quoted value."""
        return False

    def row_end(self, data: bytes, is_open: bool) -> tuple[int, bool]:
        """The end of the row that goes on in `data`, or 0; and whether `data` ends within a quoted
        value."""
        newline = _NEWLINES.search(data)
        return newline.end() if newline else 0, False

    def without_long(
        self, rows: DelimitedRows, line: int, most_bytes: int
    ) -> Iterator[DelimitedRows]:
        """The same rows, except that each that is too long is rejected alone."""
        if len(rows.data) <= most_bytes:
            yield rows
            return
        start = end = 0
        while row := self._row.match(rows.data, end):
            num_bytes = len(row[0].strip(b"\r\n"))
            if num_bytes > most_bytes:
                if start < end:
                    yield DelimitedRows(rows.data[start:end], rows.reason, rows.warning)
                first = line + rows.data.count(b"\n", 0, end)
                reason = _long_reason(num_bytes, most_bytes, first, first + row[0].count(b"\n"))
                yield DelimitedRows(row[0], reason)
                start = row.end()
            end = row.end()
        if start < len(rows.data):
            yield DelimitedRows(rows.data[start:], rows.reason, rows.warning)


class QuotedRows(Lines):
    """Rows whose values may be quoted, and then hold newlines."""

    def __init__(self, delimiter: str) -> None:
        self._warned = False
        comma = delimiter.encode()
        self._beside = np.zeros(256, np.bool_)
        self._beside[[*comma, *b'\r\n"']] = True
        few = rb'"(?:[^"\n]++|"")*+(?:\n(?:[^"\n]++|"")*+){0,%d}+"(?![^%b\r\n])'
        closed = few % (_MANY_LINES - 1, comma)
        loose = rb'"(?:[^"\r\n]++|"")*+"[^%b\r\n]*+' % comma
        plain = rb'[^"%b\r\n][^%b\r\n]*+|%b' % (comma, comma, comma)
        any_quoted = rb'"(?:[^"]++|"")*+"'
        self.sound_rows = re.compile(rb"(?:(?:%b|%b|%b)*+[\r\n])*+" % (closed, loose, plain))
        self._long_row = re.compile(
            rb"(?:%b(?![^%b\r\n])|%b|%b)*+[\r\n]" % (any_quoted, comma, loose, plain)
        )
        self._values = re.compile(rb"(?:%b[^%b\r\n]*+|%b)*+" % (any_quoted, comma, plain))
        self._row = re.compile(rb"[\r\n]*+(?=[^\r\n])%b[\r\n]" % self._values.pattern)

    def cut(self, data: bytes, line: int) -> Iterator[DelimitedRows]:
        """The whole rows that `data` begins with; its first line has the number `line`."""
        end = self.sound_end(data)
        if end is None:
            yield from self._cut_carefully(data, line)
        elif end:
            yield DelimitedRows(data[:end])

    def unclosed(self, data: bytes, line: int) -> str:
        """Why `data`, the end of a file, is no whole row."""
        values = self._values.match(data)
        first = line + data.count(b"\n", 0, values.end() if values else 0)
        last = line + data.rstrip(b"\r\n").count(b"\n")
        return f"a quoted value begins in line {first} and never ends: {_lost(first, last)}"

    def is_open(self, row: bytes) -> bool:
        """Whether the beginning of a row ends within a quoted value."""
        row = row.lstrip(b"\r\n")
        values = self._values.match(row)
        return not values or values.end() < len(row)

    def row_end(self, data: bytes, is_open: bool) -> tuple[int, bool]:
        """The end of the row that goes on in `data`, or 0; and whether `data` ends within a quoted
        value."""
        characters = np.frombuffer(data, np.uint8)
        are_open = (np.cumsum(characters == _QUOTE, dtype=np.uint8) + is_open) % 2 == 1
        ends = np.flatnonzero(((characters == _NEWLINE) | (characters == _RETURN)) & ~are_open)
        return (int(ends[0]) + 1, False) if len(ends) else (0, bool(are_open[-1]))

    def sound_end(self, data: bytes) -> int | None:
        """The end of the whole rows; None where quotes or a very long value call for care."""
        if b'"' not in data:
            return _behind_newline(data, 0, len(data))
        characters = np.frombuffer(data, np.uint8)
        quotes = np.flatnonzero(characters == _QUOTE)
        opening, closing = quotes[::2], quotes[1::2]
        before = characters[opening - 1]
        before[:1] = before[:1] if opening[0] else _NEWLINE
        after = characters[np.minimum(closing + 1, len(data) - 1)]
        if not (self._beside[before].all() and self._beside[after].all()):
            return None
        starts, ends = opening[before != _QUOTE], closing[after != _QUOTE]
        if not self._warned and _have_many_lines(characters, starts[: len(ends)], ends):
            return None
        return _end_outside(data, starts, ends)

    def _cut_carefully(self, data: bytes, line: int) -> Iterator[DelimitedRows]:
        """Sound rows together, and each of the others alone."""
        start = 0
        while True:
            sound = self.sound_rows.match(data, start)
            assert sound, "the pattern matches nothing at least"
            if sound.end() > start:
                yield DelimitedRows(sound[0])
            line += data.count(b"\n", start, sound.end())
            row = self._row.match(data, sound.end())
            if not row:
                return
            start = row.end()
            last = line + row[0].rstrip(b"\r\n").count(b"\n")
            if self._long_row.fullmatch(row[0]):
                yield DelimitedRows(row[0], warning=self._warning(line, last))
            else:
                reason = "a quoted value spans lines and goes on behind its closing quote"
                yield DelimitedRows(row[0], f"{reason}: {_lost(line, last)}")
            line += row[0].count(b"\n")

    def _warning(self, first: int, last: int) -> str | None:
        if self._warned:
            return None
        self._warned = True
        return (
            f"one row is made of lines {first} to {last}, for a quoted value has more than "
            f"{_MANY_LINES} lines; is a quote not closed? (said once a file)"
        )


def whole_rows(blocks: Iterable[bytes], syntax: Lines, most_bytes: int) -> Iterator[DelimitedRows]:
    """Cut a file behind rows. The first row, which names the columns, comes alone.

    A row of more than `most_bytes` is dropped while it is read, and rejected.

    Raises:
        ValueError: The header is too long.
    """
    rest, line, has_header = b"", 1, False
    long: _LongRow | None = None
    for block in _with_last_newline(blocks):
        if long:
            end = long.add(block)
            if not end:
                continue
            yield DelimitedRows(b"", long.reason(most_bytes, line))
            line += long.newlines
            rest, long = block[end:], None
        else:
            rest += block
        if not has_header:
            rest = rest.removeprefix(codecs.BOM_UTF8)
            end = syntax.header_end(rest)
            if not end and len(rest) > most_bytes:
                raise ValueError(f"the header {too_long(len(rest), most_bytes)}")
            if not end:
                continue
            has_header = True
            yield DelimitedRows(rest[:end])
            line += rest.count(b"\n", 0, end)
            rest = rest[end:]
        end = 0
        for rows in syntax.cut(rest, line):
            yield from syntax.without_long(rows, line + rest.count(b"\n", 0, end), most_bytes)
            end += len(rows.data)
        line += rest.count(b"\n", 0, end)
        rest = rest[end:]
        if len(rest) > most_bytes:
            long, rest = _LongRow(rest, syntax), b""
    if long:
        yield DelimitedRows(b"", long.reason(most_bytes, line))
    elif rest.strip(b"\r\n"):
        yield DelimitedRows(rest, syntax.unclosed(rest, line))


def _with_last_newline(blocks: Iterable[bytes]) -> Iterator[bytes]:
    block = b""
    for block in blocks:
        yield block
    if not block.endswith(b"\n"):
        yield b"\n"


class _LongRow:
    """A row that is too long. Its bytes are dropped; only their number is kept."""

    def __init__(self, beginning: bytes, syntax: Lines) -> None:
        self.newlines = beginning.count(b"\n")
        self._num_bytes = len(beginning.lstrip(b"\r\n"))
        self._syntax, self._is_open = syntax, syntax.is_open(beginning)

    def add(self, block: bytes) -> int:
        """Go on with a block; the end of the row in it, or 0."""
        end, self._is_open = self._syntax.row_end(block, self._is_open)
        self._num_bytes += end - 1 if end else len(block)
        self.newlines += block.count(b"\n", 0, end or None)
        return end

    def reason(self, most_bytes: int, first_line: int) -> str:
        """Why it is rejected, given the line it began in."""
        return _long_reason(self._num_bytes, most_bytes, first_line, first_line + self.newlines)


def _long_reason(num_bytes: int, most_bytes: int, first_line: int, next_line: int) -> str:
    last_line = max(first_line, next_line - 1)
    hint = "; is a quote not closed?" if first_line < last_line else ""
    return f"the row {too_long(num_bytes, most_bytes)}: {_lost(first_line, last_line)}{hint}"


def _have_many_lines(characters: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> bool:
    """Whether a quoted value has so many lines that something should be said."""
    newlines = np.flatnonzero(characters == _NEWLINE)
    lines = np.searchsorted(newlines, ends) - np.searchsorted(newlines, starts)
    return bool((lines >= _MANY_LINES).any())


def _end_outside(data: bytes, starts: np.ndarray, ends: np.ndarray) -> int:
    """Return the place behind the last newline outside quoted values; 0 without such a newline."""
    stop = int(starts[len(ends)]) if len(starts) > len(ends) else len(data)
    for value in range(len(ends) - 1, -1, -1):
        if end := _behind_newline(data, int(ends[value]) + 1, stop):
            return end
        stop = int(starts[value])
    return _behind_newline(data, 0, stop)


def _behind_newline(data: bytes, start: int, stop: int) -> int:
    return max(data.rfind(b"\n", start, stop), data.rfind(b"\r", start, stop)) + 1


def _lost(first: int, last: int) -> str:
    return f"line {first} is lost" if first == last else f"lines {first} to {last} are lost"
