"""What tests of corpora share: reading one in process, records and rejects by their numbers."""

from pathlib import Path
from typing import Any

from tokenfeed.tools.corpus.input_files import MAX_RECORD_BYTES
from tokenfeed.tools.corpus.read_records import read_records
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.corpus.units import cut_units

__all__ = ["Found", "read", "read_bytes"]

Found = tuple[dict[int, Any], dict[int, str]]


def read(
    path: Path,
    kind: FieldKind = FieldKind.TEXT,
    shard_bytes: int = 10**9,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Found:
    """The values of the field `text`, and the reasons for rejection, by record."""
    good: dict[int, Any] = {}
    bad: dict[int, str] = {}
    corpus = find_corpus(
        (str(path),), out=path.parent / "out", field="text", max_record_bytes=max_record_bytes
    )
    for part in (part for unit in cut_units(corpus.sources, shard_bytes) for part in unit.parts):
        for records in read_records(part, {"text": kind}):
            numbers = records.numbers.tolist()
            assert not {*numbers, *dict(records.rejects)} & (good.keys() | bad.keys())
            good |= zip(numbers, records.fields["text"], strict=True)
            bad |= records.rejects
    return good, bad


def read_bytes(path: Path, data: bytes) -> Found:
    path.write_bytes(data)
    return read(path)
