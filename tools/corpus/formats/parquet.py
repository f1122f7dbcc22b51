"""Read Parquet by row groups. If a row group is damaged, its records are lost.

Only the footer and the wanted columns of an object in a store are read.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from tokenfeed.pipeline.remote.object_file import SeekableFile, Span, SpansFile
from tokenfeed.tools.corpus.blocks import DAMAGE, damage_reason
from tokenfeed.tools.corpus.formats.tables import BATCH_ROWS, numbered, table_format
from tokenfeed.tools.corpus.locations import Location
from tokenfeed.tools.corpus.records import Fields, Records, rejected

if TYPE_CHECKING:
    import pyarrow.parquet as pq


_BATCH_BYTES = 1 << 22
"""Bytes of the row groups that are read together, by the footer. A caller may need only the first
records."""
_STREAMED_BYTES = 1 << 18
"""Bytes of a column in a store that are decompressed together, or a page. The whole column is never
in memory."""


@dataclass(frozen=True, slots=True)
class _ParquetTable:
    file: "pq.ParquetFile"
    size: int
    source: SpansFile | None = None
    """The source of the bytes, if it is a store."""

    @property
    def schema(self) -> pa.Schema:
        return self.file.schema_arrow

    def group_rows(self) -> list[int]:
        return [self._num_rows(group) for group in range(self.file.num_row_groups)]

    def read(self, fields: Fields, start: int, stop: int | None, first: int) -> Iterator[Records]:
        """See `Table.read`."""
        groups = list(range(start, self.file.num_row_groups if stop is None else stop))
        chunks = self._chunks(groups, fields)
        if self.source:
            self.source.expect(map(_span, chunks), at_once=len(chunks) // max(len(groups), 1))
        total = sum(map(self._num_rows, groups))
        text_bytes = sum(chunk.total_uncompressed_size for chunk in chunks)
        rows_at_once = min(max(_BATCH_BYTES * total // max(text_bytes, 1), 1), BATCH_ROWS)
        for group in groups:
            record, first = first, first + self._num_rows(group)
            try:
                for batch in self.file.iter_batches(
                    rows_at_once,
                    row_groups=[group],
                    columns=list(fields),
                    use_threads=self.source is None,  # Arrow's threads would block Ctrl-C
                ):
                    yield numbered(batch, fields, record, total)
                    record += batch.num_rows
            except DAMAGE as error:
                reason = f"records {record} to {first - 1} cannot be read: {damage_reason(error)}"
                yield rejected(record, fields, f"row group {group} is damaged, {reason}")

    def _num_rows(self, group: int) -> int:
        count = int(self.file.metadata.row_group(group).num_rows)
        if count < 0:
            raise ValueError(f"row group {group} has {count} rows")
        return count

    def _chunks(self, groups: list[int], fields: Fields) -> "list[pq.ColumnChunkMetaData]":
        """Return the column chunks of the wanted fields in some row groups. A field with children
        has a chunk for each child. Empty if the footer is damaged there, or the chunks are
        encrypted."""
        paths = self.file.reader.column_paths  # `file.schema` lives until a garbage collection
        wanted = [number for number, path in enumerate(paths) if path[0] in fields]
        if not self._has_sound_chunks(groups, wanted):
            return []
        by_group = map(self.file.metadata.row_group, groups)
        return [group.column(number) for group in by_group for number in wanted]

    def _has_sound_chunks(self, groups: list[int], columns: list[int]) -> bool:
        """Return whether the footer describes these column chunks correctly.

        Asking for the metadata of a damaged column chunk aborts the process. Reading raises
        instead, before Arrow asks for any byte of the chunk.
        """
        import pyarrow.parquet as pq

        empty = _Empty(self.size)
        source = pa.PythonFile(empty, mode="r")
        file = pq.ParquetFile(source, metadata=self.file.metadata, pre_buffer=True)
        try:
            next(file.reader.iter_batches(1, row_groups=groups, column_indices=columns), None)
        except DAMAGE:
            return empty.was_read
        return True


class _Empty(SeekableFile):
    """A file that ends before its size.

    Its methods do not raise, because Arrow never frees a reader after an error of its file.
    """

    was_read = False

    def _bytes(self, at: int, size: int) -> bytes:
        self.was_read = True
        return b""


def _span(chunk: "pq.ColumnChunkMetaData") -> Span:
    """Return the range of a column chunk in the file."""
    start = min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset)
    return start, start + chunk.total_compressed_size


@contextmanager
def _open(place: Location) -> Iterator[_ParquetTable]:
    """Open a Parquet file. Pages with checksums are verified.

    Raises:
        OSError: The file cannot be read.
        pyarrow.ArrowException: The file is not Parquet.
    """
    import pyarrow.parquet as pq  # 0.05 s that only its readers should pay

    if isinstance(place, str):
        with pq.ParquetFile(place, page_checksum_verification=True) as file:
            yield _ParquetTable(file, os.path.getsize(place))
        return
    source = SpansFile(place, place.info.name, place.info.size)
    with pq.ParquetFile(
        pa.PythonFile(source, mode="r"),
        page_checksum_verification=True,
        pre_buffer=False,
        buffer_size=_STREAMED_BYTES,
    ) as file:
        yield _ParquetTable(file, place.info.size, source)


PARQUET = table_format(
    "parquet", (".parquet", ".pq", ".parq"), _open, magic=b"PAR1", cut_at_once=32, text_ratio=4
)
