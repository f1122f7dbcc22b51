"""A format that tokenfeed does not have, as one who adds it would write it: FASTA sequences."""

from collections.abc import Iterator
from pathlib import Path

from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.input_files import FilePart, InputFile
from tokenfeed.tools.corpus.records import Fields, Records, records_of

__all__ = ["FASTA", "write_fasta"]


def _read(part: FilePart, fields: Fields) -> Iterator[Records]:
    sequences = b"".join(part.blocks()).split(b">")[1:]
    rows = (dict(zip(("title", "text"), one.split(b"\n", 1), strict=True)) for one in sequences)
    yield records_of(enumerate(rows, part.first_record), fields, part.weight_bytes)


def _cut(source: InputFile, shard_bytes: int) -> Iterator[FilePart]:
    """A part is one sequence after the other, until they fill a shard."""
    content = Path(source.path).read_bytes()
    start = 0
    while start < len(content):
        stop = content.find(b">", start + shard_bytes) % (len(content) + 1)
        first, weight_bytes = content[:start].count(b">"), stop - start
        yield FilePart(
            source=source, start=start, stop=stop, first_record=first, weight_bytes=weight_bytes
        )
        start = stop


def _begins(start: bytes, field: str) -> bool:
    return start.startswith(b">") and field in ("title", "text")


FASTA = Format(name="fasta", endings=(".fasta", ".fa"), read=_read, cut=_cut, begins=_begins)


def write_fasta(path: Path, texts: list[str]) -> None:
    path.write_text("".join(f">{number}\n{text}" for number, text in enumerate(texts)))
