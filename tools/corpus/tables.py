"""Read tables: Parquet by row groups, Arrow files and streams by record batches, CSV from the top.

Columns come as Arrow arrays. A column whose values are all sound is turned into Python values at
once; where one is null, invalid or of another kind, the batch is checked row by row.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from tokenfeed.tools.corpus.blocks import READ_ERRORS, Blocks
from tokenfeed.tools.corpus.records import Fields, Kind, Records, Reject, Unusable, records_of

__all__ = [
    "arrow_batches",
    "arrow_schema",
    "column_problem",
    "read_arrow",
    "read_csv",
    "read_parquet",
]

_BATCH_ROWS = 1 << 12
_CSV_BLOCK_BYTES = 1 << 24
"""No line of a .csv can be longer."""
_ARROW_MAGIC = b"ARROW1"


def read_parquet(path: str, fields: Fields, start: int, stop: int | None) -> Iterator[Records]:
    """Read row groups `start` up to `stop` of a Parquet file, numbered from 0."""
    with pq.ParquetFile(path) as file:
        groups = list(range(start, file.num_row_groups if stop is None else stop))
        total = sum(file.metadata.row_group(group).num_rows for group in groups)
        batches = file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=list(fields))
        yield from _numbered(batches, fields, total)


def read_arrow(path: str, fields: Fields, start: int, stop: int | None) -> Iterator[Records]:
    """Read record batches `start` up to `stop` of an Arrow file or stream, numbered from 0."""
    wanted = list(itertools.islice(arrow_batches(path), start, stop))
    total = sum(batch.num_rows for batch in wanted)
    slices = (
        batch.slice(row, _BATCH_ROWS).select(list(fields))
        for batch in wanted
        for row in range(0, batch.num_rows, _BATCH_ROWS)
    )
    yield from _numbered(slices, fields, total)


def arrow_batches(path: str) -> Iterator[pa.RecordBatch]:
    """The record batches of an Arrow file or stream, mapped into memory and read when used."""
    with pa.memory_map(path) as file:
        reader = _reader(file)
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from reader


def arrow_schema(file: pa.NativeFile) -> pa.Schema:
    """The schema of an open Arrow file or stream."""
    return _reader(file).schema


def column_problem(schema: pa.Schema, fields: Fields) -> str | None:
    """Why a table of this schema cannot give `fields`, or None where it can."""
    for name, kind in fields.items():
        if name not in schema.names:
            return f"no column `{name}`; it has: {', '.join(schema.names)}"
        if schema.names.count(name) > 1:
            return f"has {schema.names.count(name)} columns `{name}`"
        if not _fits(schema.field(name).type, kind):
            return f"column `{name}` is {schema.field(name).type}, expected {kind.value}"
    return None


def read_csv(blocks: Blocks, fields: Fields, delimiter: str) -> Iterator[Records]:
    """Read a CSV file whose first line names its columns; a quoted value may hold newlines."""
    rejects: dict[int, Reject] = {}  # the reader is ahead of the batches it gives

    def reject(row: csv.InvalidRow) -> str:
        record = row.number - 2  # the header is number 1
        reason = f"has {row.actual_columns} values, expected {row.expected_columns}"
        rejects[record] = Reject(record, reason)
        return "skip"

    file = _File(blocks)
    reader = csv.open_csv(
        file,
        csv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK_BYTES),
        csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=reject),
        csv.ConvertOptions(
            check_utf8=False,
            include_columns=list(fields),
            column_types={name: pa.large_binary() for name in fields},
        ),
    )
    first = 0
    for batch in reader:
        candidates = np.arange(first, first + batch.num_rows + len(rejects), dtype=np.uint64)
        numbers = np.setdiff1d(candidates, np.array([*rejects], np.uint64))[: batch.num_rows]
        records = _records(batch, fields, numbers)
        first = int(numbers[-1]) + 1 if len(numbers) else first
        records.rejects.extend(rejects.pop(record) for record in [*rejects] if record < first)
        yield records
    yield Records(np.empty(0, np.uint64), {name: [] for name in fields}, [*rejects.values()])
    if file.damage:
        raise file.damage


def _reader(file: pa.NativeFile) -> Any:
    is_file = file.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
    file.seek(0)
    return pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)


class _File:
    """Blocks as the file object that Arrow reads from.

    No read ends on a carriage return, since Arrow would lose a newline that follows it. Damage is
    kept for later and looks like the end of the file, so that Arrow gives what came before it.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.damage: Exception | None = None
        self.closed = False
        self._blocks = iter(blocks)
        self._rest = b""

    def read(self, size: int) -> bytes:
        while len(self._rest) <= size and (block := self._next_block()):
            self._rest += block
        data = self._rest[:size].rstrip(b"\r") if len(self._rest) > size else self._rest
        data = data or self._rest[: size + 1]
        self._rest = self._rest[len(data) :]
        return data

    def _next_block(self) -> bytes:
        try:
            return next(self._blocks, b"")
        except READ_ERRORS as error:
            self.damage = error
            cut = self._rest.rfind(b"\n") + 1  # a line that was cut short is no line
            self._rest = self._rest[:cut]
            return b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def _numbered(batches: Iterator[pa.RecordBatch], fields: Fields, total: int) -> Iterator[Records]:
    """Records numbered from 0, each batch weighing its part of 1."""
    first = 0
    for batch in batches:
        numbers = np.arange(first, first + batch.num_rows, dtype=np.uint64)
        records = _records(batch, fields, numbers)
        first += batch.num_rows
        yield Records(
            records.numbers, records.fields, records.rejects, batch.num_rows / max(total, 1)
        )


def _records(batch: pa.RecordBatch, fields: Fields, numbers: np.ndarray) -> Records:
    columns = {name: _plain(batch.column(name), kind) for name, kind in fields.items()}
    if all(_is_sound(columns[name], kind) for name, kind in fields.items()):
        return Records(numbers, {name: column.to_pylist() for name, column in columns.items()})
    lists = [_listed(column) for column in columns.values()]
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True))
    return records_of(zip(numbers.tolist(), rows, strict=True), fields)


def _fits(kind: pa.DataType, wanted: Kind) -> bool:
    if pa.types.is_dictionary(kind):
        return _fits(kind.value_type, wanted)
    if wanted in (Kind.WORDS, Kind.LABELS):
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        return is_list and _fits(kind.value_type, Kind.TEXT if wanted is Kind.WORDS else Kind.LABEL)
    if wanted is Kind.LABEL and (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        return True
    return _is_text(kind)


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def _plain(column: pa.Array, kind: Kind) -> pa.Array:
    """The column without dictionary encoding, texts as bytes: they may not be valid UTF-8."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kind in (Kind.WORDS, Kind.LABELS) and pa.types.is_dictionary(column.type.value_type):
        column = column.cast(pa.large_list(column.type.value_type.value_type))
    if pa.types.is_string(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    return column.cast(pa.large_binary()) if _is_text(column.type) else column


def _is_sound(column: pa.Array, kind: Kind) -> bool:
    """Whether all values are of a simple kind, none is null, and all text is valid UTF-8."""
    if column.null_count or kind is not Kind.TEXT:
        return False
    try:
        pa.LargeStringArray.from_buffers(
            len(column), *column.buffers()[1:], offset=column.offset
        ).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _listed(column: pa.Array) -> list[Any]:
    """Python values; a list of invalid UTF-8 shows as what it is, not as an error for all."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]
    return values


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return Unusable("has invalid UTF-8")
