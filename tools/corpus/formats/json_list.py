"""Read a JSON file with one list of records, element by element."""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.json_lines import json_object
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.records import Fields, Records, records_of

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


def _read(part: FilePart, fields: Fields) -> Iterator[Records]:
    blocks = part.blocks()
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
    read=_read,
    begins=is_json_list,
    is_vague=True,
    is_compressible=True,
)
