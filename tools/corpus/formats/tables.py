"""Tables in files of any format: their columns, as Arrow arrays, become records.

A column whose values are all sound is turned into Python values at once; where one is null, invalid
or of another kind, the batch is checked row by row. A table is read and cut by groups of rows: the
row groups of Parquet, the record batches of Arrow.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.tools.corpus.input_files import FilePart, Format, InputFile, whole
from tokenfeed.tools.corpus.locations import Location
from tokenfeed.tools.corpus.records import (
    RAW_KINDS,
    FieldKind,
    Fields,
    Records,
    Reject,
    Unusable,
    fits,
    is_text,
    lacks,
    records_of,
    rejected,
    too_long,
)

_ARRAYS: dict[FieldKind, type[np.generic]] = {
    FieldKind.IDS: np.int64,
    FieldKind.NUMBERS: np.float64,
}
"""Kinds whose values are arrays, and their dtype."""
BATCH_ROWS = 1 << 12
"""Rows that are read at once."""


class Table(Protocol):
    """An open table."""

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns, perhaps with the names of classes as metadata."""
        ...

    def group_rows(self) -> list[int]:
        """The number of records of each group of rows."""
        ...

    def read(self, fields: Fields, start: int, stop: int | None, first: int) -> Iterator[Records]:
        """Read groups of rows.

        Args:
            fields: The columns to read. The table has all of them.
            start: The first group.
            stop: The number after the last group to read. None reads to the end.
            first: The number of the first record.

        Returns:
            Records. The weight of each is its share of the rows, so all weights sum up to 1.
        """
        ...


OpenTable = Callable[[Location], AbstractContextManager[Table]]
"""Opens a table; raises OSError, ValueError or ArrowException if it cannot be read."""


def read_table(part: FilePart, fields: Fields, *, open_table: OpenTable) -> Iterator[Records]:
    """Read some groups of rows of a table. If a column is missing, the file is one reject."""
    with open_table(part.source.path) as table:
        if problem := column_problem(table.schema, fields):
            if not part.start:  # once for the file
                yield rejected(part.first_record, fields, problem)
            return
        for records in table.read(fields, part.start, part.stop, part.first_record):
            records = without_long(records, fields, part.source.max_record_bytes)
            yield replace(records, weight_bytes=records.weight_bytes * part.weight_bytes)


def without_long(records: Records, fields: Fields, most_bytes: int) -> Records:
    """Return records without those that have a field with more than `most_bytes` of text."""
    long: dict[int, Reject] = {}
    for name, kind in fields.items():
        values = records.fields[name]
        if (kind.item or kind) not in (FieldKind.TEXT, *RAW_KINDS):
            continue
        for place, value in enumerate(values):
            num_bytes = _text_bytes(value)
            if num_bytes > most_bytes:
                reason = f"field `{name}` {too_long(num_bytes, most_bytes)}"
                long.setdefault(place, Reject(int(records.numbers[place]), reason))
    if not long:
        return records
    kept = np.setdiff1d(np.arange(len(records)), [*long])
    return replace(records.take(kept), rejects=[*records.rejects, *long.values()])


def _text_bytes(value: Any) -> int:
    """Return the size of a text, or of the words of a list, as UTF-8. Other values have none."""
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, list):
        return sum(len(word) for word in value if isinstance(word, bytes))
    return len(value) if isinstance(value, bytes) else 0


def cut_table(source: InputFile, shard_bytes: int, *, open_table: OpenTable) -> Iterator[FilePart]:
    """Cut a table into parts: neighbouring groups of rows, as many as fit into a shard.

    A file that cannot be read stays whole, to be rejected as such.
    """
    try:
        with open_table(source.path) as table:
            rows = table.group_rows()
    except (OSError, pa.ArrowException, ValueError):
        yield from whole(source, shard_bytes)
        return
    rows_wanted = sum(rows) * shard_bytes / max(source.text_bytes, 1)
    start = first_record = num_rows = 0
    for stop, of_group in enumerate(rows, 1):
        num_rows += of_group
        if stop < len(rows) and num_rows + rows[stop] <= rows_wanted:
            continue
        yield FilePart(
            source=source,
            start=start,
            stop=stop,
            first_record=first_record,
            weight_bytes=source.text_bytes * num_rows // max(sum(rows), 1),
        )
        start, first_record, num_rows = stop, first_record + num_rows, 0


def table_format(
    name: str, endings: tuple[str, ...], open_table: OpenTable, magic: bytes, **more: Any
) -> Format:
    """Return a format whose files contain tables and begin with `magic`. `open_table` opens one."""

    def schema(place: Location) -> pa.Schema:
        with open_table(place) as table:
            return table.schema

    return Format(
        name=name,
        endings=endings,
        read=partial(read_table, open_table=open_table),
        cut=partial(cut_table, open_table=open_table),
        begins=lambda start, field: start.startswith(magic),
        schema=schema,
        **more,
    )


def column_problem(schema: pa.Schema, fields: Fields) -> str | None:
    """Return why a table with this schema lacks some of `fields`; None if it has all of them that
    are not optional."""
    for name, kind in fields.items():
        if name not in schema.names:
            if kind is FieldKind.OPTIONAL_JSON:
                continue
            return lacks("column", name, schema.names)
        if schema.names.count(name) > 1:
            return f"has {schema.names.count(name)} columns `{name}`"
        if not fits(schema.field(name).type, kind):
            return f"column `{name}` is {schema.field(name).type}, expected {kind.value}"
    return None


def numbered(batch: pa.RecordBatch, fields: Fields, first: int, total: int) -> Records:
    """Return a batch that begins with record `first`, weighted by its share of `total` rows."""
    numbers = np.arange(first, first + batch.num_rows, dtype=np.uint64)
    records = batch_records(batch, fields, numbers)
    return replace(records, weight_bytes=batch.num_rows / max(total, 1))


def batch_records(batch: pa.RecordBatch, fields: Fields, numbers: np.ndarray) -> Records:
    """Return the records of a batch with a column for each field. Missing columns are null.

    Raises:
        pyarrow.ArrowInvalid: It is damaged.
    """
    present = batch.schema.names
    columns = {
        name: _plain(batch.column(name), kind) if name in present else pa.nulls(batch.num_rows)
        for name, kind in fields.items()
    }
    if all(_is_sound(columns[name], kind) for name, kind in fields.items()):
        return Records(numbers, {n: _values(columns[n], kind) for n, kind in fields.items()})
    lists = [_listed(column, fields[name]) for name, column in columns.items()]
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True))
    return records_of(zip(numbers.tolist(), rows, strict=True), fields)


def _plain(column: pa.Array, kind: FieldKind) -> pa.Array:
    """The column without dictionary encoding, texts as bytes: they may not be valid UTF-8."""
    if pa.types.is_dictionary(column.type):
        _check_dictionary(column)
        column = column.dictionary_decode()
    if kind.item and pa.types.is_dictionary(column.type.value_type):
        _check_dictionary(column.values)
        column = column.cast(pa.large_list(column.type.value_type.value_type))
    if pa.types.is_string(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    if is_text(column.type):
        column = column.cast(pa.large_binary())
        column.validate(full=True)  # damaged offsets would be followed anywhere
    return column


def _check_dictionary(column: pa.DictionaryArray) -> None:
    """Damaged indices and offsets would be followed anywhere.

    Arrow's own check of them also asks that every text is valid UTF-8.
    """
    column.indices.validate()
    _plain(column.dictionary, FieldKind.TEXT)
    ends = pc.min_max(column.indices).as_py()  # pyright: ignore[reportAttributeAccessIssue]
    if ends["min"] is not None and not 0 <= ends["min"] <= ends["max"] < len(column.dictionary):
        raise pa.ArrowInvalid(f"index {ends['max']} of a dictionary of {len(column.dictionary)}")


def _is_sound(column: pa.Array, kind: FieldKind) -> bool:
    """Whether all values are of a simple kind, none is null, and all text is valid UTF-8."""
    if kind in _ARRAYS and pa.types.is_nested(column.type):
        column.validate(full=True)  # damaged offsets would be followed anywhere
        values = column.flatten()
        if column.null_count or values.null_count:
            return False
        if kind is FieldKind.NUMBERS:
            return bool(np.isfinite(_numpy(values, kind)).all())
        least = pc.min(values).as_py()  # pyright: ignore[reportAttributeAccessIssue]
        most = pc.max(values).as_py()  # pyright: ignore[reportAttributeAccessIssue]
        return least is None or (least >= 0 and most < 1 << 63)
    if column.null_count or kind is not FieldKind.TEXT:
        return False
    try:
        pa.LargeStringArray.from_buffers(
            len(column), *column.buffers()[1:], offset=column.offset
        ).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _values(column: pa.Array, kind: FieldKind) -> list[Any] | Ragged:
    """Return the values of a sound column."""
    if kind not in _ARRAYS:
        return list(column.to_pylist())
    values = _numpy(column.flatten(), kind)
    sizes: np.ndarray = np.from_dlpack(pc.list_value_length(column))  # pyright: ignore[reportAttributeAccessIssue]
    if kind is FieldKind.IDS:
        return Ragged(values, sizes.astype(np.int64, copy=False))
    return np.split(values, np.cumsum(sizes)[:-1]) if len(sizes) else []


def _numpy(values: pa.Array, kind: FieldKind) -> np.ndarray:
    """Return numbers without nulls as an array."""
    try:
        numbers = np.from_dlpack(values)  # `to_numpy` imports pandas
    except (pa.ArrowException, NotImplementedError):  # such as bool
        numbers = values.to_numpy(zero_copy_only=False)
    array: np.ndarray = numbers.astype(_ARRAYS[kind])
    return array


def _listed(column: pa.Array, kind: FieldKind) -> list[Any]:
    """Python values; a list of invalid UTF-8 shows as what it is, not as an error for all."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]
    if kind in RAW_KINDS:
        return [without_nulls(value) for value in values]
    return values


def without_nulls(value: Any) -> Any:
    """Return an object without the keys that its table has for other objects only."""
    if isinstance(value, list) and value and isinstance(value[0], tuple):  # of the type map
        value = dict(value)
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return Unusable("has invalid UTF-8")
