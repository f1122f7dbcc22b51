"""Read Arrow files and streams by record batches, mapped into memory.

A damaged batch costs its own records; in a stream, all that follows.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from tokenfeed.tools.corpus.damage import DAMAGE, damage_reason
from tokenfeed.tools.corpus.formats.format import Format
from tokenfeed.tools.corpus.formats.tables import (
    BATCH_ROWS,
    OpenTable,
    cut_table,
    numbered,
    read_table,
    table_schema,
)
from tokenfeed.tools.corpus.kinds import Fields
from tokenfeed.tools.corpus.places import Place, local_copy
from tokenfeed.tools.corpus.records import Records, rejected

__all__ = ["ARROW"]

_MAGIC = b"ARROW1"


@dataclass(frozen=True, slots=True)
class _ArrowTable:
    path: str

    @property
    def schema(self) -> pa.Schema:
        with pa.memory_map(self.path) as file:
            return _reader(file).schema

    def group_rows(self) -> list[int]:
        return list(map(_num_rows, _batches(self.path)))

    def read(self, fields: Fields, start: int, stop: int | None, first: int) -> Iterator[Records]:
        """See `Table.read`."""
        wanted = list(itertools.islice(_batches(self.path), start, stop))
        total = sum(map(_num_rows, wanted))
        for index, batch in enumerate(wanted, start):
            for row in range(0, _num_rows(batch), BATCH_ROWS):
                try:
                    if isinstance(batch, Exception):
                        raise batch
                    slice_ = batch.slice(row, BATCH_ROWS).select(list(fields))
                    yield numbered(slice_, fields, first + row, total)
                except DAMAGE as error:
                    reason = f"record batch {index} is damaged: {damage_reason(error)}"
                    yield rejected(first + row, fields, reason)
            first += _num_rows(batch)


def _batches(path: str) -> Iterator[pa.RecordBatch | Exception]:
    """The record batches of an Arrow file or stream, mapped into memory and read when used.

    An error stands in place of a damaged batch; a stream ends with the first one.
    """
    with pa.memory_map(path) as file:
        reader = _reader(file)
        if not isinstance(reader, pa.ipc.RecordBatchFileReader):
            yield from reader
            return
        for index in range(reader.num_record_batches):
            try:
                batch = reader.get_batch(index)
            except DAMAGE as error:
                batch = error
            yield batch


def _num_rows(batch: pa.RecordBatch | Exception) -> int:
    """The records that a batch counts for: 1 for a damaged batch, which may not say how many."""
    return 1 if isinstance(batch, Exception) else batch.num_rows


def _reader(file: pa.NativeFile) -> Any:
    is_file = file.read(len(_MAGIC)) == _MAGIC
    file.seek(0)
    return pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)


@contextmanager
def _open(place: Place) -> Iterator[_ArrowTable]:
    with local_copy(place) as path:
        yield _ArrowTable(path)


_OPEN: OpenTable = _open
ARROW = Format(
    name="arrow",
    endings=(".arrow", ".feather"),
    read=partial(read_table, open_table=_OPEN),
    cut=partial(cut_table, open_table=_OPEN),
    schema=partial(table_schema, open_table=_OPEN),
)
