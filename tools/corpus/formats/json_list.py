"""Read a JSON file that holds one list of records; it is decoded as a whole."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import replace

from tokenfeed.tools.corpus.formats.format import Format
from tokenfeed.tools.corpus.formats.json_lines import json_object
from tokenfeed.tools.corpus.kinds import Fields
from tokenfeed.tools.corpus.parts import Part
from tokenfeed.tools.corpus.records import Records, records_of

__all__ = ["JSON_LIST", "is_json_list", "json_list"]


def is_json_list(start: bytes, field: str) -> bool:
    """Whether a list begins whose first element is an object, with `field` or without."""
    text = start.removeprefix(codecs.BOM_UTF8).decode(errors="replace").lstrip()
    try:
        value, _ = json.JSONDecoder().raw_decode(text.removeprefix("[").lstrip())
    except (ValueError, RecursionError):
        return False
    return text.startswith("[") and isinstance(value, dict)


def json_list(content: bytes, fields: Fields) -> Records:
    """The records of a whole file that holds one list of objects.

    Raises:
        ValueError: It is no JSON list.
    """
    values = json.loads(content.removeprefix(codecs.BOM_UTF8).decode())
    if not isinstance(values, list):
        raise ValueError(f"expected a list, got {type(values).__name__}")
    return records_of(enumerate(map(json_object, values)), fields)


def _read(part: Part, fields: Fields) -> Iterator[Records]:
    yield replace(json_list(b"".join(part.blocks()), fields), weight_bytes=part.weight_bytes)


JSON_LIST = Format(
    name="json",
    endings=(".json",),
    read=_read,
    begins=is_json_list,
    is_vague=True,
    is_compressible=True,
)
