"""Read tables: Parquet by row groups, Arrow files and streams by record batches.

Columns come as Arrow arrays. A column whose values are all sound is turned into Python values at
once; where one is null, invalid or of another kind, the batch is checked row by row. What is
damaged costs its row group or record batch, in an Arrow stream all that follows.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokenfeed.tools.corpus.damage import DAMAGE, damage_reason
from tokenfeed.tools.corpus.records import Fields, Kind, Records, Unusable, records_of, rejected

if TYPE_CHECKING:
    import pyarrow.parquet as pq

__all__ = [
    "arrow_batches",
    "arrow_schema",
    "batch_records",
    "batch_rows",
    "column_problem",
    "open_parquet",
    "read_arrow",
    "read_parquet",
]

_BATCH_ROWS = 1 << 12
_ARROW_MAGIC = b"ARROW1"


def open_parquet(path: str) -> "pq.ParquetFile":
    """Open a Parquet file; its pages are checked where they have checksums.

    Raises:
        OSError: It cannot be read.
        pyarrow.ArrowException: It is none.
    """
    import pyarrow.parquet as pq  # 0.05 s that only its readers should pay

    return pq.ParquetFile(path, page_checksum_verification=True)


def read_parquet(
    path: str, fields: Fields, start: int, stop: int | None, first: int
) -> Iterator[Records]:
    """Read row groups `start` up to `stop` of a Parquet file, numbered from `first`.

    Each of the records given weighs its part of 1.
    """
    with open_parquet(path) as file:
        groups = list(range(start, file.num_row_groups if stop is None else stop))
        total = sum(file.metadata.row_group(group).num_rows for group in groups)
        record = first
        try:
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=list(fields)):
                yield _numbered(batch, fields, record, total)
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
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=list(fields)):
                skipped = min(max(given - record, 0), batch.num_rows)
                yield _numbered(batch.slice(skipped), fields, record + skipped, total)
                record += batch.num_rows
        except DAMAGE as error:
            lost = max(record, given)
            reason = f"records {lost} to {end - 1} cannot be read: {damage_reason(error)}"
            yield rejected(lost, fields, f"row group {group} is damaged, {reason}")


def read_arrow(
    path: str, fields: Fields, start: int, stop: int | None, first: int
) -> Iterator[Records]:
    """Read record batches `start` up to `stop` of an Arrow file or stream, numbered from `first`.

    Each of the records given weighs its part of 1.
    """
    wanted = list(itertools.islice(arrow_batches(path), start, stop))
    total = sum(map(batch_rows, wanted))
    for index, batch in enumerate(wanted, start):
        for row in range(0, batch_rows(batch), _BATCH_ROWS):
            try:
                if isinstance(batch, Exception):
                    raise batch
                slice_ = batch.slice(row, _BATCH_ROWS).select(list(fields))
                yield _numbered(slice_, fields, first + row, total)
            except DAMAGE as error:
                reason = f"record batch {index} is damaged: {damage_reason(error)}"
                yield rejected(first + row, fields, reason)
        first += batch_rows(batch)


def arrow_batches(path: str) -> Iterator[pa.RecordBatch | Exception]:
    """The record batches of an Arrow file or stream, mapped into memory and read when used.

    In place of a damaged one stands the error; a stream ends with its first.
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


def batch_rows(batch: pa.RecordBatch | Exception) -> int:
    """How many records a batch counts for: a damaged one, which may not say how many, for one."""
    return 1 if isinstance(batch, Exception) else batch.num_rows


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


def _reader(file: pa.NativeFile) -> Any:
    is_file = file.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
    file.seek(0)
    return pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)


def _numbered(batch: pa.RecordBatch, fields: Fields, first: int, total: int) -> Records:
    """A batch that begins with record `first` and weighs its part of `total` rows."""
    numbers = np.arange(first, first + batch.num_rows, dtype=np.uint64)
    records = batch_records(batch, fields, numbers)
    return replace(records, weight_bytes=batch.num_rows / max(total, 1))


def batch_records(batch: pa.RecordBatch, fields: Fields, numbers: np.ndarray) -> Records:
    """The records of a batch, which has a column for each field.

    Raises:
        pyarrow.ArrowInvalid: It is damaged.
    """
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
        _check_dictionary(column)
        column = column.dictionary_decode()
    if kind in (Kind.WORDS, Kind.LABELS) and pa.types.is_dictionary(column.type.value_type):
        _check_dictionary(column.values)
        column = column.cast(pa.large_list(column.type.value_type.value_type))
    if pa.types.is_string(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    if _is_text(column.type):
        column = column.cast(pa.large_binary())
        column.validate(full=True)  # damaged offsets would be followed anywhere
    return column


def _check_dictionary(column: pa.DictionaryArray) -> None:
    """Damaged indices and offsets would be followed anywhere.

    Arrow's own check of them also asks that every text is valid UTF-8.
    """
    column.indices.validate()
    _plain(column.dictionary, Kind.TEXT)
    ends = pc.min_max(column.indices).as_py()
    if ends["min"] is not None and not 0 <= ends["min"] <= ends["max"] < len(column.dictionary):
        raise pa.ArrowInvalid(f"index {ends['max']} of a dictionary of {len(column.dictionary)}")


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
