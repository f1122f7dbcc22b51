"""Read the records of a part of the corpus, whatever its format, many at a time.

A damaged file costs what follows the damage, and gives one reject there.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace

from tokenfeed.tools.corpus.blocks import Blocks, whole_lines
from tokenfeed.tools.corpus.damage import DAMAGE, damage_reason
from tokenfeed.tools.corpus.delimited import read_delimited
from tokenfeed.tools.corpus.json_lines import JsonLines, json_list
from tokenfeed.tools.corpus.records import Fields, Kind, Records, records_of, rejected
from tokenfeed.tools.corpus.tables import column_problem, read_arrow, read_parquet
from tokenfeed.tools.corpus.units import Part, table_schema

__all__ = ["read_records", "read_texts"]

_DELIMITERS = {"csv": ",", "tsv": "\t"}


def read_records(part: Part, fields: Fields) -> Iterator[Records]:
    """Read every record of `part`, with the weight of the part spread over them.

    Raises:
        CorpusError: The file has vanished or changed since the corpus was listed.
    """
    part.source.check_unchanged()
    behind = part.first_record
    try:
        for records in _READERS[part.source.format](part, fields):
            last = records.rejects[-1].record if records.rejects else -1
            last = max(last, int(records.numbers[-1]) if len(records) else -1)
            behind = max(behind, last + 1)
            yield records
            part.source.check_unchanged()  # what is mapped into memory must not be cut off
    except DAMAGE as error:
        reason = damage_reason(error)
        part.source.check_unchanged()  # then that is the reason
        yield rejected(behind, fields, f"cannot be read from here on: {reason}")
    part.source.check_unchanged()


def read_texts(part: Part, fields: Fields) -> Iterator[bytes]:
    """Only the texts of a part, of whichever of `fields` hold some; words are joined by spaces."""
    textual = (Kind.TEXT, Kind.WORDS)
    wanted: Fields = {name: kind for name, kind in fields.items() if kind in textual}
    for records in read_records(part, wanted):
        for name, kind in wanted.items():
            values = records.fields[name]
            yield from values if kind is Kind.TEXT else map(b" ".join, values)


def _read_text(part: Part, fields: Fields) -> Iterator[Records]:
    """The whole file is one record, and the first field that takes a text."""
    utf8 = b"".join(_blocks(part))
    name = next((name for name, kind in fields.items() if kind is Kind.TEXT), "")
    yield records_of([(0, {name: utf8})], fields, part.weight_bytes)


def _read_json_lines(part: Part, fields: Fields) -> Iterator[Records]:
    decoder = _json_lines(tuple(fields.items()))
    blocks = _blocks(part)
    record, consumed = part.first_record, 0
    for lines in whole_lines(iter(blocks)):
        records, num_lines = decoder.decode(lines, record)
        yield replace(records, weight_bytes=_weight(part, blocks.consumed_bytes - consumed))
        record += num_lines
        consumed = blocks.consumed_bytes


def _read_json_list(part: Part, fields: Fields) -> Iterator[Records]:
    yield replace(json_list(b"".join(_blocks(part)), fields), weight_bytes=part.weight_bytes)


def _read_delimited(part: Part, fields: Fields) -> Iterator[Records]:
    blocks, consumed = _blocks(part), 0
    delimiter = _DELIMITERS[part.source.format]
    for records in read_delimited(blocks, fields, name=part.source.name, delimiter=delimiter):
        yield replace(records, weight_bytes=_weight(part, blocks.consumed_bytes - consumed))
        consumed = blocks.consumed_bytes


def _read_table(part: Part, fields: Fields) -> Iterator[Records]:
    """Parquet or Arrow; where a column is missing, the file is one reject."""
    if problem := column_problem(table_schema(part.source), fields):
        if not part.start:  # once for the file
            yield rejected(part.first_record, fields, problem)
        return
    read = read_parquet if part.source.format == "parquet" else read_arrow
    for records in read(part.source.path, fields, part.start, part.stop, part.first_record):
        yield replace(records, weight_bytes=records.weight_bytes * part.weight_bytes)


_READERS = {
    "text": _read_text,
    "jsonl": _read_json_lines,
    "json": _read_json_list,
    "csv": _read_delimited,
    "tsv": _read_delimited,
    "parquet": _read_table,
    "arrow": _read_table,
}


@functools.cache
def _json_lines(fields: tuple[tuple[str, Kind], ...]) -> JsonLines:
    return JsonLines(dict(fields))


def _blocks(part: Part) -> Blocks:
    return Blocks(part.source.path, part.source.compression, part.start, part.stop)


def _weight(part: Part, consumed_bytes: int) -> float:
    whole = part.source.bytes if part.stop is None else part.stop - part.start
    return part.weight_bytes * consumed_bytes / max(whole, 1)
