"""Cut a corpus into units: the pieces of work that each become one shard.

Many small files go together; a big .jsonl is cut at newlines, a Parquet file at row groups; a
compressed file cannot be entered in the middle and stays whole. The cut depends on the input and
the shard size alone, never on who does the work. Its price: a big .jsonl is read once more, to find
the cuts and to know which record each begins with.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from tokenfeed.tools.blocks import read_blocks
from tokenfeed.tools.corpus import Source

__all__ = ["Part", "Unit", "auto_shard_bytes", "cut_units", "parquet_problem"]

SMALLEST_SHARD_BYTES, LARGEST_SHARD_BYTES = 8_000_000, 256_000_000
_SHARDS_WANTED = 64
_COMPRESSION_RATIO = 4
"""Text is about this much bigger than its .gz or .zst: for weighing work, nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Consecutive records of one input file."""

    source: Source
    start: int = 0
    """First byte (.jsonl) or first row group (.parquet)."""
    stop: int | None = None
    """Byte or row group after the last; None for a whole file."""
    first_record: int = 0
    weight_bytes: int
    """Bytes of text expected: for sharing out work and for progress, not for the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """What one worker turns into one shard of each split."""

    number: int
    parts: tuple[Part, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of text expected."""
        return sum(part.weight_bytes for part in self.parts)


def auto_shard_bytes(sources: Iterable[Source]) -> int:
    """A 64th of the input, within 8 MB to 256 MB: small corpora still occupy many cores."""
    total = sum(_whole(source).weight_bytes for source in sources)
    return min(max(total // _SHARDS_WANTED, SMALLEST_SHARD_BYTES), LARGEST_SHARD_BYTES)


def cut_units(sources: Iterable[Source], shard_bytes: int, text_field: str) -> tuple[Unit, ...]:
    """Cut `sources` into units of at most about `shard_bytes` of text each, in their order."""
    units: list[Unit] = []
    parts: list[Part] = []
    weight_bytes = 0
    for source in sources:
        for part in _cut(source, shard_bytes, text_field):
            if parts and weight_bytes + part.weight_bytes > shard_bytes:
                units.append(Unit(number=len(units), parts=tuple(parts)))
                parts, weight_bytes = [], 0
            parts.append(part)
            weight_bytes += part.weight_bytes
    if parts:
        units.append(Unit(number=len(units), parts=tuple(parts)))
    return tuple(units)


def parquet_problem(schema: pa.Schema, text_field: str) -> str | None:
    """Why a Parquet file of this schema has no text to give, or None where it has."""
    if text_field not in schema.names:
        return f"no column `{text_field}`; it has: {', '.join(schema.names)}"
    kind = schema.field(text_field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return None
    return f"column `{text_field}` is {kind}, expected text"


def _cut(source: Source, shard_bytes: int, text_field: str) -> Iterator[Part]:
    if source.kind == "parquet":
        return _cut_row_groups(source, text_field)
    if source.kind == "jsonl" and not source.compression and source.bytes > shard_bytes:
        return _cut_lines(source, shard_bytes)
    return iter((_whole(source),))


def _whole(source: Source) -> Part:
    ratio = _COMPRESSION_RATIO if source.compression else 1
    return Part(source=source, weight_bytes=source.bytes * ratio)


def _cut_lines(source: Source, shard_bytes: int) -> Iterator[Part]:
    """Byte ranges of nearly equal size, each ending behind a newline, in one pass."""
    goal_bytes = source.bytes / math.ceil(source.bytes / shard_bytes)
    start = position = first_record = lines = 0
    for block in read_blocks(source.path):
        searched = 0
        while (
            newline := block.find(b"\n", max(searched, _before(start, goal_bytes, position)))
        ) >= 0:
            end = newline + 1
            lines += block.count(b"\n", searched, end)
            yield _range(source, start, position + end, first_record)
            start, first_record, searched = position + end, lines, end
        lines += block.count(b"\n", searched)
        position += len(block)
    if start < position:
        yield _range(source, start, position, first_record)


def _before(start: int, goal_bytes: float, position: int) -> int:
    """Where in the block at `position` the last byte of a part from `start` would best stand."""
    return math.ceil(start + goal_bytes) - 1 - position


def _range(source: Source, start: int, stop: int, first_record: int) -> Part:
    return Part(
        source=source,
        start=start,
        stop=stop,
        first_record=first_record,
        weight_bytes=stop - start,
    )


def _cut_row_groups(source: Source, text_field: str) -> Iterator[Part]:
    """A part for each row group; a file that cannot be used stays whole, to be rejected as such."""
    try:
        with pq.ParquetFile(source.path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (OSError, pa.ArrowException):
        yield _whole(source)
        return
    if parquet_problem(schema, text_field):
        yield _whole(source)
        return
    leaves = [metadata.schema.column(index).path for index in range(len(metadata.schema))]
    column = leaves.index(text_field)
    first_record = 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        yield Part(
            source=source,
            start=index,
            stop=index + 1,
            first_record=first_record,
            weight_bytes=group.column(column).total_uncompressed_size,
        )
        first_record += group.num_rows
