"""Read a text file as one record."""

import codecs
from collections.abc import Iterator

from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.records import (
    FieldKind,
    Fields,
    Records,
    Unusable,
    checker,
    records_of,
    too_long,
)


def _read(part: FilePart, fields: Fields) -> Iterator[Records]:
    """Yield the whole file as the value of the first field with texts."""
    name = next((name for name, kind in fields.items() if kind is FieldKind.TEXT), "")
    yield records_of([(0, _row(part, name))], fields, part.weight_bytes)


def _row(part: FilePart, name: str) -> dict[str, bytes] | Unusable:
    pieces: list[bytes] = []
    num_bytes, most_bytes = 0, part.source.max_record_bytes
    for block in part.blocks():
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


TEXT = Format(name="text", endings=(".txt",), read=_read, is_compressible=True)
