"""Text files: a file is one record."""

import codecs
from collections.abc import Iterator

from tokenfeed.tools.corpus.formats.format import Format
from tokenfeed.tools.corpus.kinds import Fields, Kind, Unusable, checker
from tokenfeed.tools.corpus.parts import Part
from tokenfeed.tools.corpus.records import Records, records_of

__all__ = ["TEXT", "UTF16_MARKS"]

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""What a text in UTF-16 begins with."""


def _read(part: Part, fields: Fields) -> Iterator[Records]:
    """The whole file is the first field that takes a text."""
    text = b"".join(part.blocks()).removeprefix(codecs.BOM_UTF8)
    name = next((name for name, kind in fields.items() if kind is Kind.TEXT), "")
    yield records_of([(0, _row(text, name))], fields, part.weight_bytes)


def _row(text: bytes, name: str) -> dict[str, bytes] | Unusable:
    if text.startswith(UTF16_MARKS):
        return Unusable("the text is UTF-16; convert it to UTF-8")
    try:
        return {name: checker(Kind.TEXT)(text)}
    except Unusable as reason:
        return Unusable(f"the text {reason}")


TEXT = Format(name="text", endings=(".txt",), read=_read, is_compressible=True)
