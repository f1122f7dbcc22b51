"""Cut CSV and TSV behind whole rows, with care where a quote may not have been closed.

A quote that nobody closed makes one value of the lines behind it. So the quotes of a block are
looked at, all at once: if each opens a value, closes one or is half of a doubled one, the rows are
sound. If not, a slower pattern looks for the rows to be rejected: those whose quoted value spans
lines and goes on behind its closing quote, or never closes.
"""

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

__all__ = ["Lines", "QuotedRows", "Rows", "whole_rows"]

_LONGEST_ROW_BYTES = 1 << 24
_MANY_LINES = 100
"""A value of more lines gets a warning: it may have swallowed rows."""
_QUOTE, _NEWLINE = ord('"'), ord("\n")


class Rows(NamedTuple):
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

    def cut(self, data: bytes, line: int) -> Iterator[Rows]:
        """The whole rows that `data` begins with; its first line has the number `line`."""
        if end := _behind_newline(data, 0, len(data)):
            yield Rows(data[:end])

    def unclosed(self, data: bytes, line: int) -> str:
        """Why `data`, the end of a file, is no whole row."""
        return "the last line is not whole"


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
        self._sound_rows = re.compile(rb"(?:(?:%b|%b|%b)*+[\r\n])*+" % (closed, loose, plain))
        self._long_row = re.compile(
            rb"(?:%b(?![^%b\r\n])|%b|%b)*+[\r\n]" % (any_quoted, comma, loose, plain)
        )
        self._values = re.compile(rb"(?:%b[^%b\r\n]*+|%b)*+" % (any_quoted, comma, plain))
        self._row = re.compile(rb"[\r\n]*+(?=[^\r\n])%b[\r\n]" % self._values.pattern)

    def cut(self, data: bytes, line: int) -> Iterator[Rows]:
        """The whole rows that `data` begins with; its first line has the number `line`."""
        end = self._sound_end(data)
        if end is None:
            yield from self._cut_carefully(data, line)
        elif end:
            yield Rows(data[:end])

    def unclosed(self, data: bytes, line: int) -> str:
        """Why `data`, the end of a file, is no whole row."""
        values = self._values.match(data)
        first = line + data.count(b"\n", 0, values.end() if values else 0)
        last = line + data.rstrip(b"\r\n").count(b"\n")
        return f"a quoted value begins in line {first} and never ends: {_lost(first, last)}"

    def _sound_end(self, data: bytes) -> int | None:
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

    def _cut_carefully(self, data: bytes, line: int) -> Iterator[Rows]:
        """Sound rows together, and each of the others alone."""
        start = 0
        while True:
            sound = self._sound_rows.match(data, start)
            assert sound, "the pattern matches nothing at least"
            if sound.end() > start:
                yield Rows(sound[0])
            line += data.count(b"\n", start, sound.end())
            row = self._row.match(data, sound.end())
            if not row:
                return
            start = row.end()
            last = line + row[0].rstrip(b"\r\n").count(b"\n")
            if self._long_row.fullmatch(row[0]):
                yield Rows(row[0], warning=self._warning(line, last))
            else:
                reason = "a quoted value spans lines and goes on behind its closing quote"
                yield Rows(row[0], f"{reason}: {_lost(line, last)}")
            line += row[0].count(b"\n")

    def _warning(self, first: int, last: int) -> str | None:
        if self._warned:
            return None
        self._warned = True
        return (
            f"one row is made of lines {first} to {last}, for a quoted value has more than "
            f"{_MANY_LINES} lines; is a quote not closed? (said once a file)"
        )


def whole_rows(blocks: Iterable[bytes], syntax: Lines) -> Iterator[Rows]:
    """Cut a file behind rows. The first row, which names the columns, comes alone.

    Raises:
        ValueError: A row is too long to be one.
    """
    rest, line, has_header = b"", 1, False
    for block in itertools.chain(blocks, (b"\n",)):  # the last line needs none
        rest += block
        if not has_header:
            rest = rest.removeprefix(codecs.BOM_UTF8)
            end = syntax.header_end(rest)
            if not end:
                continue
            has_header = True
            yield Rows(rest[:end])
            line += rest.count(b"\n", 0, end)
            rest = rest[end:]
        end = 0
        for rows in syntax.cut(rest, line):
            yield rows
            end += len(rows.data)
        line += rest.count(b"\n", 0, end)
        rest = rest[end:]
        if len(rest) > _LONGEST_ROW_BYTES:
            raise ValueError(
                f"the row that begins in line {line} has more than {_LONGEST_ROW_BYTES:,} bytes; "
                "is a quote not closed?"
            )
    if rest.strip(b"\r\n"):
        yield Rows(rest, syntax.unclosed(rest, line))


def _have_many_lines(characters: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> bool:
    """Whether a quoted value has so many lines that something should be said."""
    newlines = np.flatnonzero(characters == _NEWLINE)
    lines = np.searchsorted(newlines, ends) - np.searchsorted(newlines, starts)
    return bool((lines >= _MANY_LINES).any())


def _end_outside(data: bytes, starts: np.ndarray, ends: np.ndarray) -> int:
    """The place behind the last newline that no quoted value encloses; 0 where there is none."""
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
