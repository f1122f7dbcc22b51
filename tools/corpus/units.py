"""Cut a corpus into units: the pieces of work that each become one shard.

Many small files go together; a big .jsonl is cut at newlines, a Parquet file at row groups, an
Arrow file at record batches; a .csv or a compressed file cannot be entered in the middle. The cut
depends on the input and the shard size alone, never on who does the work. Its price: a big .jsonl
is read once more, to find the cuts and to know which record each begins with.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tokenfeed.tools.corpus.blocks import Blocks
from tokenfeed.tools.corpus.sources import InputFile
from tokenfeed.tools.corpus.tables import (
    arrow_batches,
    arrow_schema,
    batch_rows,
    open_parquet,
)

__all__ = ["Part", "Unit", "auto_shard_bytes", "cut_units", "table_schema"]

SMALLEST_SHARD_BYTES, LARGEST_SHARD_BYTES = 8_000_000, 256_000_000
_SHARDS_WANTED = 64
_COMPRESSION_RATIO = 4
"""Text is about this much bigger than its .gz, .zst or .parquet: for weighing work, no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Consecutive records of one input file."""

    source: InputFile
    start: int = 0
    """First byte (.jsonl), row group (.parquet) or record batch (.arrow)."""
    stop: int | None = None
    """The one after the last; None for a whole file."""
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


def auto_shard_bytes(sources: Iterable[InputFile]) -> int:
    """A 64th of the input, within 8 MB to 256 MB: small corpora still occupy many cores."""
    total = sum(_whole(source).weight_bytes for source in sources)
    return min(max(total // _SHARDS_WANTED, SMALLEST_SHARD_BYTES), LARGEST_SHARD_BYTES)


def cut_units(sources: Iterable[InputFile], shard_bytes: int) -> tuple[Unit, ...]:
    """Cut `sources` into units of at most about `shard_bytes` of text each.

    They keep their order, but those of one given split come together.

    Files of different given splits do not share a unit.
    """
    units: list[Unit] = []
    parts: list[Part] = []
    weight_bytes = 0
    for source in sorted(sources, key=lambda source: source.split or ""):
        for part in _cut(source, shard_bytes):
            is_full = weight_bytes + part.weight_bytes > shard_bytes
            if parts and (is_full or parts[-1].source.split != source.split):
                units.append(Unit(number=len(units), parts=tuple(parts)))
                parts, weight_bytes = [], 0
            parts.append(part)
            weight_bytes += part.weight_bytes
    if parts:
        units.append(Unit(number=len(units), parts=tuple(parts)))
    return tuple(units)


def table_schema(source: InputFile) -> pa.Schema:
    """The schema of a Parquet or Arrow file.

    Raises:
        OSError: It cannot be read.
        pyarrow.ArrowException: It is none.
    """
    if source.format == "parquet":
        with open_parquet(source.path) as file:
            return file.schema_arrow
    with pa.memory_map(source.path) as file:
        return arrow_schema(file)


def _cut(source: InputFile, shard_bytes: int) -> Iterator[Part]:
    if source.format in ("parquet", "arrow"):
        return _cut_table(source, shard_bytes)
    if source.format == "jsonl" and not source.compression and source.bytes > shard_bytes:
        return _cut_lines(source, shard_bytes)
    return iter((_whole(source),))


def _whole(source: InputFile) -> Part:
    ratio = _COMPRESSION_RATIO if source.compression or source.format == "parquet" else 1
    return Part(source=source, weight_bytes=source.bytes * ratio)


def _cut_lines(source: InputFile, shard_bytes: int) -> Iterator[Part]:
    """Byte ranges of nearly equal size, each ending behind a newline, in one pass."""
    goal_bytes = source.bytes / math.ceil(source.bytes / shard_bytes)
    start = position = first_record = lines = 0
    for block in Blocks(source.path):
        searched = 0
        while (
            newline := block.find(b"\n", max(searched, _before(start, goal_bytes, position)))
        ) >= 0:
            end = newline + 1
            lines += _count_newlines(block, searched, end)
            yield _range(source, start, position + end, first_record)
            start, first_record, searched = position + end, lines, end
        lines += _count_newlines(block, searched, len(block))
        position += len(block)
    if start < position:
        yield _range(source, start, position, first_record)


def _count_newlines(block: bytes, start: int, stop: int) -> int:
    """A third of the time of `bytes.count`, which looks at one byte after the other."""
    return int(np.count_nonzero(np.frombuffer(block, np.uint8)[start:stop] == ord("\n")))


def _before(start: int, goal_bytes: float, position: int) -> int:
    """Where in the block at `position` the last byte of a part from `start` would best stand."""
    return math.ceil(start + goal_bytes) - 1 - position


def _range(source: InputFile, start: int, stop: int, first_record: int) -> Part:
    return Part(
        source=source,
        start=start,
        stop=stop,
        first_record=first_record,
        weight_bytes=stop - start,
    )


def _cut_table(source: InputFile, shard_bytes: int) -> Iterator[Part]:
    """Row groups or record batches, neighbours together while they fit into a shard.

    A file that cannot be read stays whole, to be rejected as such.
    """
    try:
        rows = _rows_of_groups(source)
    except (OSError, pa.ArrowException, ValueError):
        yield _whole(source)
        return
    per_row = source.bytes * (_COMPRESSION_RATIO if source.format == "parquet" else 1)
    rows_wanted = sum(rows) * shard_bytes / max(per_row, 1)
    start = first_record = num_rows = 0
    for stop, of_group in enumerate(rows, 1):
        num_rows += of_group
        if stop < len(rows) and num_rows + rows[stop] <= rows_wanted:
            continue
        yield Part(
            source=source,
            start=start,
            stop=stop,
            first_record=first_record,
            weight_bytes=per_row * num_rows // max(sum(rows), 1),
        )
        start, first_record, num_rows = stop, first_record + num_rows, 0


def _rows_of_groups(source: InputFile) -> list[int]:
    if source.format == "arrow":
        return [batch_rows(batch) for batch in arrow_batches(source.path)]
    with open_parquet(source.path) as file:
        return [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
