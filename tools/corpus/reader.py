"""Read the records of a part of the corpus, whatever its format, many at a time.

A damaged file costs what follows the damage, and gives one reject there.
"""

from collections.abc import Iterator

from tokenfeed.tools.corpus.damage import DAMAGE, damage_reason
from tokenfeed.tools.corpus.formats.registry import FORMATS
from tokenfeed.tools.corpus.kinds import Fields, Kind
from tokenfeed.tools.corpus.parts import Part
from tokenfeed.tools.corpus.records import Records, rejected

__all__ = ["read_records", "read_texts"]


def read_records(part: Part, fields: Fields) -> Iterator[Records]:
    """Read every record of `part`, with the weight of the part spread over them.

    Raises:
        CorpusError: The file has vanished or changed since the corpus was listed.
    """
    part.source.check_unchanged()
    behind, format_ = part.first_record, FORMATS[part.source.format]
    try:
        for records in format_.read(part, fields):
            last = records.rejects[-1].record if records.rejects else -1
            last = max(last, int(records.numbers[-1]) if len(records) else -1)
            behind = max(behind, last + 1)
            yield records
            part.source.check_unchanged()  # what is mapped into memory must not be cut off
    except (*DAMAGE, *format_.damage) as error:
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
