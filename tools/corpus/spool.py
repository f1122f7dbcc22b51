"""Copy input that can be read only once, standard input and Python objects, to a temporary file.

Several processes can read the file several times. On Linux, the file has no name in a folder, so
the system deletes it when it is closed, or when this process ends in any way. Elsewhere, a kill
leaves the file behind. Its checksum shows whether a continued run reads the same input. Python
objects become JSON Lines, so their shards are identical to the shards of the same rows in a file.
"""

import contextlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import pyarrow as pa
import xxhash

from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.tools.corpus.formats.tables import without_nulls
from tokenfeed.tools.corpus.records import RAW_KINDS, FieldKind, Fields, shown_names

_BLOCK_BYTES = 1 << 22
_BATCH_RECORDS = 1000
"""Rows that are encoded together."""
NAMED_RECORDS = 1000
"""Records whose fields are named if they are not read."""
_DEEP = {bytes, dict, list, tuple}
"""Types of values that may have bytes inside."""
_SCALARS = {FieldKind.TEXT, FieldKind.LABEL, FieldKind.NUMBER}
"""Kinds whose values are not lists or dicts."""


class Spooled(NamedTuple):
    """A temporary file with input of this process."""

    name: str
    """Name of the input in errors and origins."""
    path: str
    """A path for other processes of this user, valid while this process has the file open."""
    checksum: int
    """xxh3-64 of the bytes."""
    file: IO[bytes]
    """The open file. Closing it deletes the file."""
    split: str | None = None
    """The split of all records. None: a hash chooses the split of each record."""
    class_names: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Names of fields with classes, each with the names of its classes."""


Spool = Callable[[], Sequence[Spooled]]
"""Copies input of this process when it is called."""


def spool(
    name: str,
    blocks: Iterable[bytes],
    out: Path | None,
    *,
    split: str | None = None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Spooled:
    """Write blocks of bytes to a temporary file.

    Args:
        name: Name of the input in errors.
        blocks: The content.
        out: The output folder. The file is on its disk. None: in the folder for temporary files.
        split: See `Spooled.split`.
        advance: Called with the number of bytes after each block.

    Raises:
        CorpusError: The disk is full.
    """
    folder = out and next(parent for parent in out.absolute().parents if parent.is_dir())
    digest = xxhash.xxh3_64()
    has_paths_of_open_files = os.path.isdir("/proc/self/fd")
    temporary = tempfile.TemporaryFile if has_paths_of_open_files else tempfile.NamedTemporaryFile
    try:
        with contextlib.ExitStack() as undo:
            file: IO[bytes] = undo.enter_context(temporary(dir=folder))

            def write(block: bytes) -> None:
                digest.update(block)
                file.write(block)

            with ThreadPoolExecutor(1) as thread:  # writes a block while the next one is made
                written: Future[None] | None = None
                for block in blocks:
                    if written:
                        written.result()
                    written = thread.submit(write, block)
                    advance(len(block))
            if written:
                written.result()
            file.flush()
            undo.pop_all()
    except OSError as error:
        raise CorpusError(
            f"{name}: cannot be copied to {folder or tempfile.gettempdir()}: {error.strerror}."
        ) from error
    path = f"/proc/{os.getpid()}/fd/{file.fileno()}" if has_paths_of_open_files else file.name
    return Spooled(name, path, digest.intdigest(), file, split)


def class_names(records: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the names of the classes of a data set of `datasets`, for `Spooled.class_names`."""
    features = getattr(records, "features", None)
    if not (type(records).__module__.startswith("datasets.") and isinstance(features, Mapping)):
        return ()
    values = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    named = {name: getattr(value, "names", None) for name, value in values.items()}
    return tuple((name, tuple(map(str, names))) for name, names in named.items() if names)


def stdin_blocks() -> Iterator[bytes]:
    """Yield the content of standard input. Raises CorpusError if it is closed."""
    if sys.stdin is None:
        raise CorpusError("`-`: standard input is closed.")
    yield from iter(partial(sys.stdin.buffer.read, _BLOCK_BYTES), b"")


def json_lines(name: str, records: object, fields: Fields, *, named: int = 0) -> Iterator[bytes]:
    """Yield records as blocks of JSON Lines, with only the given fields.

    A record that lacks a field keeps the names of its other fields, for the reject. Records with
    lists or dicts are encoded at once, because an iterator may use these objects again.

    Args:
        name: Name of the records in errors.
        records: A `datasets.Dataset` or `IterableDataset`; any table that exports Arrow streams
            (pyarrow, pandas, polars, DuckDB), or a column of it, the first field; a list of
            mappings; or a function that returns an iterator of mappings, of texts (each the first
            field), or of Arrow tables.
        fields: The fields that the task reads.
        named: How many records at the beginning keep the names of their other fields.

    Raises:
        ConfigError: `records` has another type, or can be read only once.
        CorpusError: A value cannot be written as JSON, or a table lacks a field. The records before
            are yielded first.
    """
    block, number = bytearray(), 0
    names: dict[str, None] = dict.fromkeys(_column_names(records) if named else ())
    try:
        for rows in _row_lists(name, records, fields, named):
            if names and number < named:
                rows = [names | row for row in rows]
            for piece in _encoded(name, number, rows):
                block += piece
            number += len(rows)
            if len(block) >= _BLOCK_BYTES:
                yield bytes(block)
                block.clear()
    except CorpusError:
        yield bytes(block)
        raise
    yield bytes(block)


def _column_names(records: object) -> list[str]:
    """Return the names of all columns of a table or a data set; empty for other records."""
    names = getattr(records, "column_names", None)
    listed = getattr(records, "columns", ()) if names is None else names
    return [*map(str, listed)] if isinstance(listed, Iterable) else []


def _row_lists(
    name: str, records: object, fields: Fields, named: int
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of records, as many as are encoded together. See `json_lines`."""
    needed, first = _needed(fields), next(iter(fields))
    most_rows = _BATCH_RECORDS if _SCALARS.issuperset(fields.values()) else 1
    rows: list[dict[str, Any]] = []
    number = num_characters = 0
    for record in _records(name, records, fields):
        if isinstance(record, str):
            rows.append({first: record})
            num_characters += len(record)
        elif isinstance(record, (dict, Mapping)):
            row = {field: _text(record[field]) for field in fields if field in record}
            if number + len(rows) < named or not row or not needed <= row.keys():
                row = dict.fromkeys(map(str, record)) | row
            rows.append(row)
            num_characters += len(text) if isinstance(text := row.get(first), str) else 0
        else:
            yield rows
            number, rows, num_characters = number + len(rows), [], 0
            if not (hasattr(record, "__arrow_c_stream__") or hasattr(record, "__arrow_c_array__")):
                raise CorpusError(
                    f"{name}, record {number}: is {_kind(record)}, expected a dict or a text."
                )
            for some in _rows(name, record, fields):
                yield some
                number += len(some)
        if len(rows) >= most_rows or num_characters >= _BLOCK_BYTES:
            yield rows
            number, rows, num_characters = number + len(rows), [], 0
    yield rows


def _records(name: str, records: object, fields: Fields) -> Iterator[object]:
    """Yield single records, or tables."""
    if type(records).__module__.startswith("datasets."):
        yield from _of_datasets(name, records, fields)
    elif hasattr(records, "__arrow_c_stream__") or hasattr(records, "__arrow_c_array__"):
        yield records
    elif callable(records):
        made: Any = records()
        if not isinstance(made, Iterable) or isinstance(made, str | bytes | Mapping):
            raise ConfigError(f"{name}: the function returns {_kind(made)}, expected an iterator.")
        if isinstance(made, Generator) and inspect.getgeneratorstate(made) != inspect.GEN_CREATED:
            raise ConfigError(
                f"{name}: the function returns a generator that was read before. Make a new one in "
                "each call."
            )
        yield from made
    elif isinstance(records, Iterator):
        raise ConfigError(
            f"{name}: {_kind(records)} can be read only once, so an interrupted run could not "
            "continue. Give the function that returns it."
        )
    elif isinstance(records, Iterable) and not hasattr(records, "columns"):  # names of columns
        yield from records
    else:
        raise ConfigError(
            f"{name}: got {_kind(records)}. Give paths, a datasets.Dataset, a table, a list of "
            "dicts, or a function that returns an iterator of dicts."
        )


def _of_datasets(name: str, records: Any, fields: Fields) -> Iterator[object]:
    """Yield the tables of a data set of `datasets`, or the values of its column as records."""
    if not hasattr(records, "column_names"):
        first = next(iter(fields))
        yield from ({first: value} for value in records)
        return
    if getattr(records, "format", {}).get("type") == "custom":
        raise ConfigError(
            f"{name}: the data set has a transform (`set_transform`), which `map` would apply and "
            "reading tables does not. Use `map`, or give the function `lambda: iter(dataset)`."
        )
    if records.column_names is not None:
        records = records.select_columns(_columns(name, fields, records.column_names))
    yield from records.with_format("arrow").iter(_BATCH_RECORDS)


def _needed(fields: Fields) -> set[str]:
    """Return the names of the fields that a record must have."""
    return {name for name, kind in fields.items() if kind is not FieldKind.OPTIONAL_JSON}


def _columns(name: str, fields: Fields, present: Iterable[str]) -> list[str]:
    """Return the columns to read of a table.

    Raises:
        CorpusError: The table lacks a field, has none of them, or has a field twice.
    """
    present = [*present]
    found = [field for field in fields if field in present]
    if doubled := [field for field in found if present.count(field) > 1]:
        raise CorpusError(f"{name}: has several columns `{doubled[0]}`. Rename or drop them.")
    if (missing := _needed(fields) - {*present}) or not found:
        raise CorpusError(
            f"{name}: no column `{'` or `'.join(sorted(missing) or fields)}`; it has: "
            f"{shown_names(present)}. Name the column with `field`."
        )
    return found


def _rows(name: str, table: Any, fields: Fields) -> Iterator[list[dict[str, Any]]]:
    """Yield lists of rows of a table that exports Arrow."""
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    elif not hasattr(table, "__arrow_c_stream__"):
        table = pa.chunked_array([pa.array(table)])
    try:
        try:
            reader = pa.RecordBatchReader.from_stream(table)
        except pa.ArrowInvalid:  # a column, like a Series
            reader = pa.table({next(iter(fields)): pa.chunked_array(table)}).to_reader()
    except (pa.ArrowException, ValueError) as error:  # pandas converts its values here
        reason = "; ".join(map(str, error.args))
        raise CorpusError(
            f"{name}: cannot be read as a table: {reason}. Give each column values of one type, "
            "like frame.astype({'text': 'string'})."
        ) from None
    for batch in reader:
        wanted = batch.select(_columns(name, fields, batch.schema.names))
        nested = [
            field
            for field in wanted.schema.names
            if fields[field] in RAW_KINDS and pa.types.is_nested(wanted.schema.field(field).type)
        ]
        fitting = _BLOCK_BYTES * batch.num_rows // max(wanted.nbytes, 1)
        step = min(max(fitting, 1), _BATCH_RECORDS)
        for start in range(0, batch.num_rows, step):
            rows = wanted.slice(start, step).to_pylist()
            if nested:
                rows = [
                    row | {each: without_nulls(row[each], fields[each]) for each in nested}
                    for row in rows
                ]
            if "binary" in str(wanted.schema.types):
                rows = [{field: _text(value) for field, value in row.items()} for row in rows]
            yield rows


def _text(value: Any) -> Any:
    """Decode bytes, also in lists and dicts, because msgspec would write them in base 64.

    Invalid UTF-8 becomes surrogates, which the reader rejects. A value that is nested too deeply
    stays as it is: the encoder or the reader rejects it.
    """
    with contextlib.suppress(RecursionError):
        return _decoded(value)
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not _DEEP.isdisjoint(map(type, value)):
        return [_decoded(item) for item in value]
    return value


def _encoded(name: str, number: int, rows: list[dict[str, Any]]) -> Iterator[bytes]:
    """Yield rows as JSON Lines. The first row has the number `number` in errors."""
    try:
        lines = _ENCODER.encode_lines(rows)
    except _UNENCODABLE:
        for at, row in enumerate(rows, number):
            yield _line(name, at, row)
    else:
        yield lines


def _line(name: str, number: int, row: dict[str, Any]) -> bytes:
    """Return a record as JSON. The standard library escapes surrogates. The reader rejects them."""
    try:
        return _ENCODER.encode(row) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(row, default=_plain).encode() + b"\n"
    except _UNENCODABLE as error:
        raise CorpusError(f"{name}, record {number}: cannot be written as JSON: {error}.") from None


def _plain(value: Any) -> Any:
    """Convert arrays and scalars of numpy and torch to lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"got {_kind(value)}, expected texts, numbers, lists and dicts")


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)
