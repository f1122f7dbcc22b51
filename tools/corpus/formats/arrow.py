"""Read Arrow files and streams by record batches, mapped into memory.

If a batch is damaged, its records are lost; in a stream, all later records too. Only the wanted
batches and columns of a file are decompressed. A stream is always read from its beginning.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa

from tokenfeed.tools.corpus.blocks import DAMAGE, damage_reason
from tokenfeed.tools.corpus.formats.tables import BATCH_ROWS, numbered, table_format
from tokenfeed.tools.corpus.locations import Location, local_copy
from tokenfeed.tools.corpus.records import Fields, Records, rejected

_MAGIC = b"ARROW1"


@dataclass(frozen=True, slots=True)
class _ArrowTable:
    file: pa.MemoryMappedFile

    @property
    def schema(self) -> pa.Schema:
        return self._reader().schema

    def group_rows(self) -> list[int]:
        batches = self._batches([0], 0, None)  # one column is enough
        return [1 if isinstance(batch, Exception) else batch.num_rows for batch in batches]

    def read(self, fields: Fields, start: int, stop: int | None, first: int) -> Iterator[Records]:
        """See `Table.read`."""
        num_batches = 1 if stop is None else stop - start
        found = map(self.schema.get_field_index, fields)
        columns = [index for index in found if index >= 0]
        for index, batch in enumerate(self._batches(columns, start, stop), start):
            if isinstance(batch, Exception):
                yield _damaged(index, batch, first, fields)
                first += self.group_rows()[index]
                continue
            for row in range(0, batch.num_rows, BATCH_ROWS):
                slice_ = batch.slice(row, BATCH_ROWS)
                try:
                    yield numbered(slice_, fields, first + row, batch.num_rows * num_batches)
                except DAMAGE as error:
                    yield _damaged(index, error, first + row, fields)
            first += batch.num_rows

    def _batches(
        self, columns: list[int], start: int, stop: int | None
    ) -> Iterator[pa.RecordBatch | Exception]:
        """Yield record batches with some columns.

        A damaged batch of a file is yielded as an error. A stream ends with the first error.
        """
        reader = self._reader(columns)
        if not isinstance(reader, pa.ipc.RecordBatchFileReader):
            yield from islice(reader, start, stop)
            return
        for index in range(start, reader.num_record_batches if stop is None else stop):
            try:
                batch = reader.get_batch(index)
            except DAMAGE as error:
                batch = error
            yield batch

    def _reader(self, columns: list[int] | None = None) -> Any:
        self.file.seek(0)
        is_file = self.file.read(len(_MAGIC)) == _MAGIC
        self.file.seek(0)
        open_any = pa.ipc.open_file if is_file else pa.ipc.open_stream
        return open_any(self.file, options=pa.ipc.IpcReadOptions(included_fields=columns))


def _damaged(index: int, error: Exception, record: int, fields: Fields) -> Records:
    reason = f"record batch {index} is damaged: {damage_reason(error)}"
    return rejected(record, fields, reason)


@contextmanager
def _open(place: Location) -> Iterator[_ArrowTable]:
    with local_copy(place) as path, pa.memory_map(path) as file:
        yield _ArrowTable(file)


ARROW = table_format("arrow", (".arrow", ".feather"), _open, magic=_MAGIC)
