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

from tokenfeed.pipeline.arithmetic import Ragged, offsets_of
from tokenfeed.tools.corpus.input_files import FilePart, Format, InputFile, whole
from tokenfeed.tools.corpus.locations import Location
from tokenfeed.tools.corpus.records import (
    RAW_KINDS,
    FieldKind,
    Fields,
    Records,
    Reject,
    Unusable,
    checker,
    fits,
    is_list,
    is_text,
    lacks,
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
        if kind is FieldKind.TEXT and max(map(len, values), default=0) <= most_bytes:
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
    reasons: dict[int, str] = {}
    values = {name: _values(columns[name], name, kind, reasons) for name, kind in fields.items()}
    records = Records(numbers, values)
    if not reasons:
        return records
    rejects = [Reject(int(numbers[row]), reasons[row]) for row in sorted(reasons)]
    kept = np.setdiff1d(np.arange(len(numbers)), [*reasons])
    return replace(records.take(kept), rejects=rejects)


def _plain(column: pa.Array, kind: FieldKind) -> pa.Array:
    """Return a column without dictionaries, its lists as large lists, its texts as bytes, because
    they may not be valid UTF-8. Lists and objects of any type stay as they are.

    Raises:
        pyarrow.ArrowInvalid: The column is damaged.
    """
    _check(column)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        return _binary(column)
    if kind in RAW_KINDS or not is_list(column.type):
        return column
    lengths = pc.fill_null(pc.list_value_length(column), 0)  # pyright: ignore[reportAttributeAccessIssue]
    ends = pa.py_buffer(offsets_of(np.from_dlpack(lengths)))  # Arrow's cast of views is wrong
    offsets = pa.Array.from_buffers(pa.int64(), len(column) + 1, [None, ends])
    items = column.flatten()
    if pa.types.is_dictionary(items.type):
        items = items.dictionary_decode()
    items = _binary(items) if is_text(items.type) else items
    return pa.LargeListArray.from_arrays(offsets, items, mask=column.is_null())


def _binary(texts: pa.Array) -> pa.Array:
    if pa.types.is_string_view(texts.type):
        texts = texts.cast(pa.large_string())
    return texts.cast(pa.large_binary())


def _check(column: pa.Array) -> None:
    """Check offsets and indexes, which would be followed anywhere if they are damaged.

    The full check of Arrow also asks that every text is valid UTF-8, and it checks all items of the
    lists of which a column is a slice.

    Raises:
        pyarrow.ArrowInvalid: The column is damaged.
    """
    types, kind = pa.types, column.type
    if is_text(kind):
        _binary(column).validate(full=True)
    elif types.is_dictionary(kind):
        column.indices.validate()
        _check(column.dictionary)
        ends = pc.min_max(column.indices).as_py()  # pyright: ignore[reportAttributeAccessIssue]
        if ends["min"] is not None and not 0 <= ends["min"] <= ends["max"] < len(column.dictionary):
            raise pa.ArrowInvalid(
                f"index {ends['max']} of a dictionary of {len(column.dictionary)}"
            )
    elif types.is_struct(kind):
        column.validate()
        for child in range(kind.num_fields):
            _check(column.field(child))
    elif types.is_fixed_size_list(kind):
        column.validate()
        _check(column.flatten())
    elif is_list(kind) or types.is_map(kind):
        column.validate()
        offsets: np.ndarray = np.from_dlpack(column.offsets)
        starts, ends = offsets[:-1], offsets[1:]
        if hasattr(column, "sizes"):  # of a view
            starts, ends = offsets, offsets + np.from_dlpack(column.sizes)
        if ((starts < 0) | (ends < starts) | (ends > len(column.values))).any():
            raise pa.ArrowInvalid("the offsets of lists are out of order")
        if len(column):
            _check(column.values.slice(starts.min(), ends.max() - starts.min()))
    elif isinstance(kind, pa.BaseExtensionType):
        _check(column.storage)
    elif types.is_nested(kind):
        column.validate(full=True)


def _values(
    column: pa.Array, name: str, kind: FieldKind, reasons: dict[int, str]
) -> list[Any] | Ragged:
    """Return the values of a column, converted at once if all are sound.

    Args:
        column: A column of `_plain`.
        name: The name of the field.
        kind: The kind of the field.
        reasons: Gets the reason for each row whose value is unusable, if it has none yet.
    """
    if kind in _ARRAYS and is_list(column.type) and not column.null_count:
        items = column.flatten()
        lengths: np.ndarray = np.from_dlpack(pc.list_value_length(column))  # pyright: ignore[reportAttributeAccessIssue]
        if not items.null_count and _are_sound(items, kind):
            array = _numpy(items).astype(_ARRAYS[kind])
            if kind is FieldKind.IDS:
                return Ragged(array, lengths.astype(np.int64, copy=False))
            return np.split(array, np.cumsum(lengths)[:-1]) if len(lengths) else []
    if kind is FieldKind.TEXT and not column.null_count and _is_utf8(column):
        return list(column.to_pylist())
    check, found = checker(kind), []
    for row, value in enumerate(_listed(column, kind)):
        try:
            if isinstance(value, Unusable):
                raise value
            found.append(check(value))
        except Unusable as reason:
            reasons.setdefault(row, f"field `{name}` {reason}")
            found.append(None)
    return found


def _are_sound(items: pa.Array, kind: FieldKind) -> bool:
    """Return whether all numbers without nulls are accepted by a kind."""
    if kind is FieldKind.NUMBERS:
        return bool(np.isfinite(_numpy(items).astype(np.float64)).all())
    ends = pc.min_max(items).as_py()  # pyright: ignore[reportAttributeAccessIssue]
    return ends["min"] is None or (ends["min"] >= 0 and ends["max"] < 1 << 63)


def _is_utf8(texts: pa.LargeBinaryArray) -> bool:
    try:
        pa.LargeStringArray.from_buffers(
            len(texts), *texts.buffers()[1:], offset=texts.offset
        ).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _numpy(values: pa.Array) -> np.ndarray:
    """Return numbers without nulls as an array."""
    try:
        return np.from_dlpack(values)  # `to_numpy` imports pandas
    except (pa.ArrowException, NotImplementedError):  # such as bool
        array: np.ndarray = values.to_numpy(zero_copy_only=False)
        return array


def _listed(column: pa.Array, kind: FieldKind) -> list[Any]:
    """Return the values as Python objects. Invalid UTF-8 inside is not an error for all."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]
    return [without_nulls(value, kind) for value in values] if kind in RAW_KINDS else values


def without_nulls(value: Any, kind: FieldKind) -> Any:
    """Return an object without the keys that its table has for other objects only. `ANY` keeps
    them: a text made of several fields has nothing in place of a null."""
    if isinstance(value, list) and value and isinstance(value[0], tuple):  # of the type map
        value = dict(value)
    if isinstance(value, dict):
        kept = ((k, v) for k, v in value.items() if v is not None or kind is FieldKind.ANY)
        return {key: without_nulls(item, kind) for key, item in kept}
    return [without_nulls(item, kind) for item in value] if isinstance(value, list) else value


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return Unusable("has invalid UTF-8")
