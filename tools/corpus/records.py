"""Records as the readers of all formats return them, and the kinds of their fields.

A record is a text file, a line of JSON Lines or CSV, or a row of Parquet or Arrow. A bad record
becomes a reject, and other records are not affected. Readers return many records at once, field by
field. The kind of a field decides which values are accepted, for all formats. A new kind is a
member of `FieldKind` and a line of `_SCALARS` or `_ITEMS`.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tokenfeed.pipeline.arithmetic import Ragged

_MOST = float(np.finfo(np.float32).max)


class FieldKind(Enum):
    """The accepted values of a field, and the type in which readers return them."""

    TEXT = "text"
    """A text, as UTF-8 bytes."""
    WORDS = "a list of texts"
    """A list of texts, as UTF-8 bytes."""
    LABEL = "a name or a whole number from 0"
    """A label, as str: numbers as digits, booleans as `false` and `true`."""
    LABELS = "a list of names or of whole numbers from 0"
    """A list of labels."""
    JSON = "a text, a list or an object"
    """Any JSON value except null. A list or object may also be a text with JSON."""
    OPTIONAL_JSON = "a text, a list or an object, or nothing"
    """Like `JSON`, or None. In JSON Lines, the field may be absent."""
    ANY = "any value"
    """Any JSON value. In JSON Lines, the field may not be absent."""
    IDS = "a list of token ids from 0"
    """A list of whole numbers, as int64 of shape (N,)."""
    NUMBERS = "a list of finite numbers"
    """A list of numbers or booleans, as float64 of shape (N,)."""
    NUMBER = "a finite number"
    """A number in the range of float32, as float. It may be a text with digits."""

    @property
    def item(self) -> "FieldKind | None":
        """The kind of each item, for a field with lists; else None."""
        return _ITEMS.get(self)


Fields = dict[str, FieldKind]
"""The fields that a task needs, by name."""


class Unusable(Exception):
    """A value does not have the kind of its field."""


def json_type(kind: FieldKind) -> Any:
    """Return the type that msgspec decodes for a kind. Values still need `checker`."""
    return list[json_type(kind.item)] if kind.item else _SCALARS[kind].json  # type: ignore[misc]


def fits(column: pa.DataType, kind: FieldKind) -> bool:
    """Return whether a column of this type can have values of a kind."""
    if pa.types.is_dictionary(column):
        return fits(column.value_type, kind)
    if kind.item:
        return is_list(column) and fits(column.value_type, kind.item)
    return is_text(column) or _SCALARS[kind].fits(column)


def checker(kind: FieldKind) -> Callable[[Any], Any]:
    """Return a function that converts a value to a kind, or raises `Unusable`."""
    if kind.item:
        return partial(_list, kind, _SCALARS[kind.item].check)
    return _SCALARS[kind].check


def is_text(column: pa.DataType) -> bool:
    """Return whether a column has texts, or bytes that may be texts."""
    types = pa.types
    return _is_any(
        *(column, types.is_string, types.is_large_string, types.is_string_view),
        *(types.is_binary, types.is_large_binary, types.is_binary_view),
    )


def is_list(column: pa.DataType) -> bool:
    """Return whether a column has lists, in any of the layouts of Arrow."""
    types = pa.types
    return _is_any(
        *(column, types.is_list, types.is_large_list, types.is_fixed_size_list),
        *(types.is_list_view, types.is_large_list_view),
    )


def _is_any(column: pa.DataType, *are_types: Callable[[pa.DataType], bool]) -> bool:
    return any(is_type(column) for is_type in are_types)


def _list(kind: FieldKind, check: Callable[[Any], Any], value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _not(kind, value)
    return [check(one) for one in value]


def _text(value: Any) -> bytes:
    if isinstance(value, bytes):
        try:
            value.decode()
        except UnicodeDecodeError as error:
            raise Unusable(f"has invalid UTF-8 at byte {error.start}") from None
        return value
    if not isinstance(value, str):
        raise _not(FieldKind.TEXT, value)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        if "\udc80" <= value[error.start] <= "\udcff":  # stands for a byte that was decoded
            raise Unusable(f"has invalid UTF-8 at character {error.start}") from None
        reason = f"has a lone surrogate at character {error.start}: no UTF-8 can express it"
        raise Unusable(reason) from None


def _label(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | bytes):
        if not value:
            raise Unusable(f"is empty, expected {FieldKind.LABEL.value}")
        return _text(value).decode()
    if isinstance(value, int) and value >= 0:
        return str(value)
    raise _not(FieldKind.LABEL, value)


def _json(value: Any) -> Any:
    if value is None:
        raise _not(FieldKind.JSON, value)
    return _optional_json(value)


def _optional_json(value: Any) -> Any:
    return _text(value).decode() if isinstance(value, str | bytes) else value


def _ids(value: Any) -> np.ndarray:
    if not isinstance(value, list) or {*map(type, value)} - {int}:  # a bool is an int, too
        raise _not_list(FieldKind.IDS, value, (int,))
    for end in (min(value), max(value)) if value else ():
        if not 0 <= end < 1 << 63:
            raise _not(FieldKind.IDS, end)
    return np.array(value, np.int64)


def _numbers(value: Any) -> np.ndarray:
    if not isinstance(value, list) or {*map(type, value)} - {int, float, bool}:
        raise _not_list(FieldKind.NUMBERS, value, (int, float, bool))
    try:
        numbers = np.array(value, np.float64)
    except OverflowError:
        raise _not(FieldKind.NUMBERS, next(one for one in value if abs(one) > _MOST)) from None
    if not np.isfinite(numbers).all():
        raise _not(FieldKind.NUMBERS, value[int(np.argmin(np.isfinite(numbers)))])
    return numbers


def _not_list(kind: FieldKind, value: Any, types: tuple[type, ...]) -> Unusable:
    wrong = [one for one in value if type(one) not in types] if isinstance(value, list) else [value]
    return _not(kind, wrong[0])


def _number(value: Any) -> float:
    is_text = isinstance(value, str | bytes)
    if is_text or (isinstance(value, Real) and not isinstance(value, bool)):
        with contextlib.suppress(ValueError, OverflowError):
            is_code = is_text and "_" in str(value)  # 1_000 is a number in Python only
            if abs(number := float(value)) <= _MOST and not is_code:  # NaN is not
                return number
    if is_text:
        shown = _text(value)[:40].decode(errors="ignore")
        raise Unusable(f"is {shown!r}, expected {FieldKind.NUMBER.value}")
    raise _not(FieldKind.NUMBER, value)


def _not(kind: FieldKind, value: Any) -> Unusable:
    shown = "null" if value is None else repr(value) if isinstance(value, int | float) else ""
    return Unusable(f"is {shown or type(value).__name__}, expected {kind.value}")


class _Scalar(NamedTuple):
    """A kind of single values."""

    json: Any
    """The type that msgspec decodes."""
    fits: Callable[[pa.DataType], bool]
    """Returns whether a column type has such values. Texts are always allowed."""
    check: Callable[[Any], Any]


def _has_any(column: pa.DataType) -> bool:
    return True


def _has_numbers(column: pa.DataType) -> bool:
    return _is_any(column, pa.types.is_integer, pa.types.is_floating)


def _has_labels(column: pa.DataType) -> bool:
    return _is_any(column, pa.types.is_integer, pa.types.is_boolean)


def _has_lists_of_ids(column: pa.DataType) -> bool:
    return is_list(column) and bool(pa.types.is_integer(column.value_type))


def _has_lists_of_numbers(column: pa.DataType) -> bool:
    return is_list(column) and (_has_numbers(column.value_type) or _has_labels(column.value_type))


_SCALARS: dict[FieldKind, _Scalar] = {
    FieldKind.IDS: _Scalar(list[int], _has_lists_of_ids, _ids),
    FieldKind.NUMBERS: _Scalar(list[float | bool], _has_lists_of_numbers, _numbers),
    FieldKind.JSON: _Scalar(Any, _has_any, _json),
    FieldKind.OPTIONAL_JSON: _Scalar(Any, _has_any, _optional_json),
    FieldKind.ANY: _Scalar(Any, _has_any, _optional_json),
    FieldKind.TEXT: _Scalar(str, is_text, _text),
    FieldKind.LABEL: _Scalar(str | int | bool, _has_labels, _label),
    FieldKind.NUMBER: _Scalar(float | str, _has_numbers, _number),
}
_ITEMS: dict[FieldKind, FieldKind] = {
    FieldKind.WORDS: FieldKind.TEXT,
    FieldKind.LABELS: FieldKind.LABEL,
}
"""What lists hold."""


RAW_KINDS = (FieldKind.JSON, FieldKind.OPTIONAL_JSON, FieldKind.ANY)
"""Kinds of values that are not converted."""

_LONGEST_NAMES = 200
"""Characters."""
NO_FIELD = "\0"
"""A field that no record has. The rejects of all records show which fields the records have."""


class Reject(NamedTuple):
    """A rejected record."""

    record: int
    reason: str


def taken(column: Any, rows: np.ndarray) -> Any:
    """Return the values of a field for the records with the given indexes."""
    return column.take(rows) if isinstance(column, Ragged) else [column[row] for row in rows]


def listed(column: Any) -> list[Any]:
    """Return the values of a field as one object for each record."""
    return column.rows() if isinstance(column, Ragged) else column


def joined(columns: Sequence[Any]) -> Any:
    """Return the values of a field for several records one after another."""
    ragged = [column for column in columns if isinstance(column, Ragged)]
    if len(ragged) < len(columns):
        return [*chain.from_iterable(map(listed, columns))]
    values, lengths = zip(*((column.values, column.lengths) for column in ragged), strict=True)
    return Ragged(np.concatenate(values), np.concatenate(lengths))


@dataclass(frozen=True, slots=True)
class Records:
    """Consecutive records of an input file, or of several files, to be encoded together."""

    numbers: np.ndarray
    """The number of each record in its file, from 0, shape (R,), uint64."""
    fields: dict[Any, Any]
    """The R values of each field: a list, or `Ragged` for ids."""
    rejects: list[Reject] = field(default_factory=list)
    """Rejected records between these records."""
    weight_bytes: float = 0
    """The share of the file's weight, for progress."""
    sources: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint32))
    """The input file of each record, shape (R,), uint32. Readers leave it empty."""
    split: str | None = None
    """The split of all records. None: a hash chooses the split of each record."""

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, kept: np.ndarray) -> "Records":
        """Return the records with the given indexes, shape (K,)."""
        fields = {name: taken(column, kept) for name, column in self.fields.items()}
        sources = self.sources[kept] if len(self.sources) else self.sources
        return replace(self, numbers=self.numbers[kept], fields=fields, sources=sources)

    @staticmethod
    def joined(parts: "list[Records]") -> "Records":
        """Return the records of several parts with the same fields and split."""
        if len(parts) == 1:
            return parts[0]
        return replace(
            parts[0],
            numbers=np.concatenate([part.numbers for part in parts]),
            fields={n: joined([part.fields[n] for part in parts]) for n in parts[0].fields},
            weight_bytes=sum(part.weight_bytes for part in parts),
            sources=np.concatenate([part.sources for part in parts]),
        )


def records_of(
    rows: Iterable[tuple[int, dict[str, Any] | Unusable]],
    fields: Fields,
    weight_bytes: float = 0,
) -> Records:
    """Check rows one by one, and return them as records. Slow, for blocks that a fast path rejects.

    Args:
        rows: The number of each record, and its values by field or the reason why it is unusable.
        fields: The fields to return.
        weight_bytes: See `Records.weight_bytes`.
    """
    checks = {name: checker(kind) for name, kind in fields.items()}
    optional = {name for name, kind in fields.items() if kind is FieldKind.OPTIONAL_JSON}
    numbers: list[int] = []
    values: dict[str, list[Any]] = {name: [] for name in fields}
    rejects: list[Reject] = []
    for number, row in rows:
        try:
            if isinstance(row, Unusable):
                raise row
            found = [
                None if name in optional and name not in row else _field(row, name, check)
                for name, check in checks.items()
            ]
        except Unusable as reason:
            rejects.append(Reject(number, str(reason)))
            continue
        numbers.append(number)
        for column, value in zip(values.values(), found, strict=True):
            column.append(value)
    return Records(np.array(numbers, np.uint64), values, rejects, weight_bytes)


def shown_names(names: Iterable[str]) -> str:
    """Return the names of fields for an error, as many as fit into a line."""
    shown = " ".join(", ".join(names).split()) or "no fields"
    return shown if len(shown) <= _LONGEST_NAMES else f"{shown[:_LONGEST_NAMES]}..."


def lacks(what: str, name: str, names: Iterable[str]) -> str:
    """Return the reason for rejecting a record, or a table, without a field or column.

    Args:
        what: "field" or "column".
        name: The missing field. For `NO_FIELD`, the reason ends with all names as JSON.
        names: The fields that the record has.
    """
    shown = json.dumps([*names]) if name == NO_FIELD else shown_names(names)
    return f"no {what} `{name}`; it has: {shown}"


def too_long(num_bytes: int, most_bytes: int) -> str:
    """Return the reason for rejecting a record or a field that is too long."""
    return f"has {num_bytes:,} bytes, more than the {most_bytes:,} of `--max-record`"


def rejected(record: int, fields: Fields, reason: str) -> Records:
    """Return no record and one reject."""
    no_values: dict[str, list[Any]] = {name: [] for name in fields}
    return Records(np.empty(0, np.uint64), no_values, [Reject(record, reason)])


def _field(row: dict[str, Any], name: str, check: Callable[[Any], Any]) -> Any:
    if name not in row:
        raise Unusable(lacks("field", name, row))
    try:
        if isinstance(row[name], Unusable):
            raise row[name]
        return check(row[name])
    except Unusable as reason:
        raise Unusable(f"field `{name}` {reason}") from None
