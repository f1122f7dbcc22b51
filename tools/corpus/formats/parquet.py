"""Read Parquet by row groups; a damaged one costs its own records."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from tokenfeed.tools.corpus.damage import DAMAGE, damage_reason
from tokenfeed.tools.corpus.formats.format import Format
from tokenfeed.tools.corpus.formats.tables import BATCH_ROWS, cut_table, numbered, read_table
from tokenfeed.tools.corpus.kinds import Fields
from tokenfeed.tools.corpus.records import Records, rejected

if TYPE_CHECKING:
    import pyarrow.parquet as pq

__all__ = ["PARQUET"]


def _open(path: str) -> "pq.ParquetFile":
    """Open a Parquet file; its pages are checked where they have checksums.

    Raises:
        OSError: It cannot be read.
        pyarrow.ArrowException: It is none.
    """
    import pyarrow.parquet as pq  # 0.05 s that only its readers should pay

    return pq.ParquetFile(path, page_checksum_verification=True)


def _read(path: str, fields: Fields, start: int, stop: int | None, first: int) -> Iterator[Records]:
    """Row groups `start` up to `stop`; see `read_table`."""
    with _open(path) as file:
        groups = list(range(start, file.num_row_groups if stop is None else stop))
        total = sum(file.metadata.row_group(group).num_rows for group in groups)
        record = first
        try:
            for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=list(fields)):
                yield numbered(batch, fields, record, total)
                record += batch.num_rows
        except DAMAGE as error:
            damage_reason(error)
            yield from _undamaged_groups(file, fields, groups, first, record)


def _undamaged_groups(
    file: "pq.ParquetFile", fields: Fields, groups: list[int], first: int, given: int
) -> Iterator[Records]:
    """Read row groups one by one; a damaged one is a reject. Records before `given` are skipped."""
    total = sum(file.metadata.row_group(group).num_rows for group in groups)
    for group in groups:
        record, end = first, first + file.metadata.row_group(group).num_rows
        first = end
        if given >= end:
            continue
        try:
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=list(fields)):
                skipped = min(max(given - record, 0), batch.num_rows)
                yield numbered(batch.slice(skipped), fields, record + skipped, total)
                record += batch.num_rows
        except DAMAGE as error:
            lost = max(record, given)
            reason = f"records {lost} to {end - 1} cannot be read: {damage_reason(error)}"
            yield rejected(lost, fields, f"row group {group} is damaged, {reason}")


def _schema(path: str) -> pa.Schema:
    with _open(path) as file:
        return file.schema_arrow


def _group_rows(path: str) -> list[int]:
    """How many rows each row group has."""
    with _open(path) as file:
        return [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]


PARQUET = Format(
    name="parquet",
    endings=(".parquet",),
    read=partial(read_table, schema=_schema, read=_read),
    cut=partial(cut_table, group_rows=_group_rows),
    schema=_schema,
    text_ratio=4,
    is_compressible=False,
)
