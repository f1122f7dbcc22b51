"""Read JSON Lines, which are decoded in blocks and can be cut, and JSON with one list.

msgspec decodes the wanted fields of a whole block of lines at about 1 GB/s, and the standard
library at 0.12 GB/s. But msgspec accepts blocks that `json` rejects line by line: several objects
on a line, one object over several lines, invalid UTF-8 in an unused field. So the result of msgspec
is used only if the block is valid UTF-8 and each line is one object. Otherwise each line is decoded
alone, by `json` if msgspec fails. The result for a line never depends on other lines: msgspec may
skip values that `json` rejects (numbers with thousands of digits, objects nested a thousand deep),
but it does this in both cases.
Blank lines are not records, but they count, so the number of a record is the number of its line.

A large file is cut at newlines. To count the records before each cut, several ranges of the file
are read at the same time.
"""

import codecs
import contextlib
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any

import msgspec
import numpy as np

from tokenfeed.pipeline.feeding.placement import num_cores
from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.tools.corpus.blocks import (
    Blocks,
    LongLine,
    is_utf8,
    marked_encoding,
    unmarked_encoding,
    whole_lines,
)
from tokenfeed.tools.corpus.input_files import FilePart, Format, InputFile, whole
from tokenfeed.tools.corpus.records import (
    FieldKind,
    Fields,
    Records,
    Unusable,
    checker,
    json_type,
    records_of,
    rejected,
    too_long,
)

_MOST_AT_ONCE = 8
"""Number of ranges of an object that are counted at the same time. A file has one per core. A range
takes about 10 MB."""
_SNIFFED_BYTES = 1 << 12
"""Bytes that show UTF-16 and UTF-32."""
_COUNTED_BYTES = 1 << 18
"""Bytes per comparison, which fit into the cache of a core."""


def cut_lines(source: InputFile, shard_bytes: int) -> Iterator[FilePart]:
    """Yield byte ranges of nearly equal size, each of which ends with a newline.

    A compressed file cannot be read from the middle, so it is not cut. Nor is text that may be
    converted to UTF-8.
    """
    is_short = source.compression or source.encoding or source.bytes <= shard_bytes
    begin = b"" if is_short else next(iter(Blocks(source.path, None, 0, _SNIFFED_BYTES)), b"")
    if is_short or marked_encoding(begin) or unmarked_encoding(begin):
        yield from whole(source, shard_bytes)
        return
    goal_bytes = source.bytes / math.ceil(source.bytes / shard_bytes)
    ranges = list(pairwise(_cuts(source, goal_bytes)))
    at_once = min(num_cores(), _MOST_AT_ONCE) if isinstance(source.path, str) else _MOST_AT_ONCE
    newlines = results_of(lambda range_: _num_newlines(source, *range_), ranges, at_once)
    for (start, stop), first in zip(ranges, accumulate(newlines, initial=0), strict=False):
        yield FilePart(
            source=source, start=start, stop=stop, first_record=first, weight_bytes=stop - start
        )


def _cuts(source: InputFile, goal_bytes: float) -> Iterator[int]:
    """Yield the first bytes of the parts, and the end of the file. Each part ends with the first
    newline after `goal_bytes`."""
    start = 0
    while start < source.bytes:
        yield start
        start = math.ceil(start + goal_bytes) - 1
        for block in Blocks(source.path, None, start, source.bytes):
            if (newline := block.find(b"\n")) >= 0:
                start += newline + 1
                break
            start += len(block)
    yield source.bytes


def _num_newlines(source: InputFile, start: int, stop: int) -> int:
    """Count newlines in half the time of `bytes.count`, which compares byte by byte."""
    total = 0
    for block in Blocks(source.path, None, start, stop):
        characters = np.frombuffer(block, np.uint8)
        for at in range(0, len(block), _COUNTED_BYTES):
            total += int(np.count_nonzero(characters[at : at + _COUNTED_BYTES] == ord("\n")))
    return total


_DEFAULTS: dict[FieldKind, tuple[None]] = {FieldKind.OPTIONAL_JSON: (None,)}
"""The values of fields that may be absent."""
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class JsonLines:
    """A decoder of blocks of whole lines into the wanted fields."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self._keys = [f"field{index}" for index in range(len(fields))]
        types: list[Any] = [
            (key, json_type(kind), *_DEFAULTS.get(kind, ()))
            for key, kind in zip(self._keys, fields.values(), strict=True)
        ]
        renamed = dict(zip(self._keys, fields, strict=True))
        self._decoder: msgspec.json.Decoder[Any] | None = None
        with contextlib.suppress(ValueError):  # a name that JSON would have to escape
            line = msgspec.defstruct("Line", types, rename=renamed, gc=False, kw_only=True)
            self._decoder = msgspec.json.Decoder(line)

    def decode(self, block: bytes, first_record: int) -> tuple[Records, int]:
        """Decode whole lines, the first of which is record `first_record`, and count them."""
        if first_record == 0:
            block = block.removeprefix(codecs.BOM_UTF8)
        if records := self.decode_sound(block, first_record):
            return records, len(records)
        return self.decode_any(block, first_record), block.count(b"\n")

    def decode_sound(self, block: bytes, first_record: int) -> Records | None:
        """Decode a block by the fast path; None if the slow path must decide."""
        if self._decoder is None or not is_utf8(block):
            return None
        try:
            lines = self._decoder.decode_lines(block)
            if not _has_one_object_a_line(block, len(lines)):
                return None
            values = {
                name: _column([getattr(line, key) for line in lines], kind)
                for key, (name, kind) in zip(self._keys, self.fields.items(), strict=True)
            }
        except (*_UNDECODABLE, Unusable):
            return None
        numbers = np.arange(first_record, first_record + len(lines), dtype=np.uint64)
        return Records(numbers, values)

    def decode_any(self, block: bytes, first_record: int) -> Records:
        """Decode a block line by line, with msgspec as deep in the stack as in the fast path."""
        rows: list[tuple[int, dict[str, Any] | Unusable]] = []
        decoder, are_utf8 = self._decoder, is_utf8(block)
        for number, line in enumerate(block.split(b"\n"), first_record):
            if not line or line.isspace():
                continue
            row = None
            is_object = line.startswith(b"{") and line.removesuffix(b"\r").endswith(b"}")
            if decoder and is_object and (are_utf8 or is_utf8(line)):
                with contextlib.suppress(*_UNDECODABLE):
                    row = self._row(decoder.decode(line))
            rows.append((number, _parsed(line) if row is None else row))
        return records_of(rows, self.fields)

    def _row(self, line: Any) -> dict[str, Any]:
        return {name: getattr(line, key) for key, name in zip(self._keys, self.fields, strict=True)}


def is_json_lines(start: bytes, field: str) -> bool:
    """Return whether a file begins with one object per line.

    A file with a single line may be any JSON, like a minified package.json. It is JSON Lines only
    if the object has `field`.
    """
    first, _, rest = start.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if not first.startswith(b"{"):
        return False
    second = rest.lstrip().partition(b"\n")[0]
    objects = [value for value in map(_parsed, (first, second)) if isinstance(value, dict)]
    return any(field in value for value in objects) or bool(objects and second)


def _column(values: list[Any], kind: FieldKind) -> list[Any]:
    if kind is FieldKind.TEXT:
        return list(map(str.encode, values))
    if kind is FieldKind.WORDS:
        return [list(map(str.encode, words)) for words in values]
    return list(map(checker(kind), values))


def _parsed(line: bytes) -> dict[str, Any] | Unusable:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Unusable(f"invalid UTF-8 at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Unusable(f"not JSON: {error}")
    return json_object(value)


def json_object(value: Any) -> dict[str, Any] | Unusable:
    """Return a value as an object, or the reason why it is not an object."""
    if isinstance(value, dict):
        return value
    return Unusable(f"expected a JSON object, got {type(value).__name__}")


def _has_one_object_a_line(block: bytes, num_objects: int) -> bool:
    """Return whether each line is exactly one object `{...}`.

    Between two objects there is `}`, optional white space and `{`. Inside an object, a comma
    separates `}` and `{`. So if there are as many lines as objects, and each line begins with `{`
    and ends with `}`, each line is one object.
    """
    characters = np.frombuffer(block, np.uint8)[: len(block) - block.endswith(b"\n")]
    if not len(characters) or characters[-1] == ord("\n"):
        return False
    newlines = np.flatnonzero(characters == ord("\n"))
    if len(newlines) != num_objects - 1:
        return False
    firsts, lasts = np.append(0, newlines + 1), np.append(newlines - 1, len(characters) - 1)
    lasts = lasts - (characters[lasts] == ord("\r"))
    return bool((characters[firsts] == ord("{")).all() and (characters[lasts] == ord("}")).all())


def _read(part: FilePart, fields: Fields) -> Iterator[Records]:
    blocks, decoder = part.text_blocks(), _json_lines(tuple(fields.items()))
    record, consumed = part.first_record, 0
    most_bytes = part.source.max_record_bytes
    for block in whole_lines(blocks, most_bytes):
        if isinstance(block, LongLine):
            reason = f"the line {too_long(block.num_bytes, most_bytes)}"
            records, num_lines = rejected(record, fields, reason), 1
        else:
            records, num_lines = decoder.decode(block, record)
        yield replace(records, weight_bytes=part.weight_of(blocks.consumed_bytes - consumed))
        record += num_lines
        consumed = blocks.consumed_bytes


@functools.cache
def _json_lines(fields: tuple[tuple[str, FieldKind], ...]) -> JsonLines:
    return JsonLines(dict(fields))


JSON_LINES = Format(
    name="jsonl",
    endings=(".jsonl", ".ndjson", ".jsonlines", ".ldjson"),
    read=_read,
    cut=cut_lines,
    begins=is_json_lines,
    is_text=True,
    has_record_per_line=True,
)


_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_LENIENT_DECODER = json.JSONDecoder(strict=False)
"""A decoder that accepts raw control characters, so a list with them is recognised, and rejected
with the reason."""
_AFTER = {"[": ("]", True), ",": ("", True), "]": ("", False)}
"""Matches what may follow a bracket or comma: brackets, commas, and an element."""


def is_json_list(start: bytes, field: str) -> bool:
    """Return whether the text begins with a list whose first element is an object."""
    text = start.removeprefix(codecs.BOM_UTF8).decode(errors="replace").lstrip()
    try:
        value, _ = _LENIENT_DECODER.raw_decode(text.removeprefix("[").lstrip())
    except (ValueError, RecursionError):
        return False
    return text.startswith("[") and isinstance(value, dict)


def _read_list(part: FilePart, fields: Fields) -> Iterator[Records]:
    blocks = part.text_blocks()
    record, consumed = part.first_record, 0
    for elements in _elements(blocks, part.source.max_record_bytes):
        weight_bytes = part.weight_of(blocks.consumed_bytes - consumed)
        yield records_of(enumerate(map(json_object, elements), record), fields, weight_bytes)
        record += len(elements)
        consumed = blocks.consumed_bytes


def _elements(blocks: Iterable[bytes], most_bytes: int) -> Iterator[list[Any]]:
    """Yield the elements of a list. Bytes that are not UTF-8 become lone surrogates.

    Raises:
        ValueError: The file is not a JSON list, or an element is too long. The elements before are
            yielded first.
    """
    utf8 = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    text, enough = "", 0
    marks, wants_element = "[", False  # what may come next
    for block in chain(blocks, (b"",)):
        text += utf8.decode(block, final=not block)
        if block and len(text) < enough:
            continue
        at, problem = 0, ""
        elements: list[Any] = []
        while (space := _SPACE.match(text, at)) and (at := space.end()) < len(text):
            if text[at] in marks:
                marks, wants_element = _AFTER[text[at]]
                at += 1
                continue
            try:
                element, end = _decoded(text, at, wants_element)
            except (ValueError, RecursionError) as error:
                problem, end = str(error), len(text)
            if block and end == len(text) and end - at <= most_bytes:
                problem = ""  # its end may be still to come
                break
            if end - at > most_bytes:
                problem = f"an element has more than the {most_bytes:,} bytes of `--max-record`"
            if problem:
                break
            elements.append(element)
            at, marks, wants_element = end, ",]", False
        if elements:
            yield elements
        if problem:
            raise ValueError(problem)
        text = text[at:]
        enough = 2 * len(text)
    if marks or wants_element:
        raise ValueError("expected a list in [ and ]")


def _decoded(text: str, at: int, wants_element: bool) -> tuple[Any, int]:
    """Return the element that begins at a position, and its end."""
    if not wants_element:
        raise ValueError(f"not a JSON list: {text[at]!r} is not expected")
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}") from error


JSON_LIST = Format(
    name="json",
    endings=(".json",),
    read=_read_list,
    begins=is_json_list,
    is_vague=True,
    is_text=True,
)
