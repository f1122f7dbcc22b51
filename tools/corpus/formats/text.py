"""Text files: a file is one record."""

from collections.abc import Iterator

from tokenfeed.tools.corpus.formats.format import Format
from tokenfeed.tools.corpus.kinds import Fields, Kind
from tokenfeed.tools.corpus.parts import Part
from tokenfeed.tools.corpus.records import Records, records_of

__all__ = ["TEXT"]


def _read(part: Part, fields: Fields) -> Iterator[Records]:
    """The whole file is the first field that takes a text."""
    utf8 = b"".join(part.blocks())
    name = next((name for name, kind in fields.items() if kind is Kind.TEXT), "")
    yield records_of([(0, {name: utf8})], fields, part.weight_bytes)


TEXT = Format(name="text", endings=(".txt",), read=_read, is_compressible=True)
