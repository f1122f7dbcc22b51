"""Records: what the readers give, whatever file they read.

A record is a text file, a line of JSON Lines or CSV, a row of Parquet or Arrow. A bad one costs
itself only and becomes a reject. Readers give many at once, field by field; a field has a kind,
and `checked` decides, for every format alike, whether a value is of that kind.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Fields", "Kind", "Records", "Reject", "Unusable", "checked", "records_of", "rejected"]


class Kind(Enum):
    """What a field must hold, and how it is given."""

    TEXT = "text"
    """A text, given as UTF-8 bytes."""
    WORDS = "a list of texts"
    """A list of texts, each given as UTF-8 bytes."""
    LABEL = "a name or a whole number from 0"
    """Given as str, whatever it was: numbers by their digits, booleans as `false` and `true`."""
    LABELS = "a list of names or of whole numbers from 0"
    """A list of labels."""


Fields = dict[str, Kind]
"""The fields that a task needs, by name."""


class Reject(NamedTuple):
    """A record that could not be used."""

    record: int
    reason: str


class Unusable(Exception):
    """Why a value is not of its kind."""


@dataclass(frozen=True, slots=True)
class Records:
    """Consecutive records of one input file."""

    numbers: np.ndarray
    """The number of each record in its file, from 0, shape (R,), uint64."""
    fields: dict[str, list[Any]]
    """The values of each field, R of them."""
    rejects: list[Reject] = field(default_factory=list)
    """Records between these that could not be used."""
    weight_bytes: float = 0
    """The part of the file's weight that they stand for: for progress."""
    warning: str | None = None
    """What should be said about them, by whoever writes them."""

    def __len__(self) -> int:
        return len(self.numbers)


def records_of(
    rows: Iterable[tuple[int, dict[str, Any] | Unusable]],
    fields: Fields,
    weight_bytes: float = 0,
) -> Records:
    """Check rows one by one: the careful way, for what a fast path would not take.

    Args:
        rows: The number of each record, and its values by field or why it has none.
        fields: What is wanted of each.
        weight_bytes: Passed on.
    """
    numbers: list[int] = []
    values: dict[str, list[Any]] = {name: [] for name in fields}
    rejects: list[Reject] = []
    for number, row in rows:
        try:
            if isinstance(row, Unusable):
                raise row
            found = [_field(row, name, kind) for name, kind in fields.items()]
        except Unusable as reason:
            rejects.append(Reject(number, str(reason)))
            continue
        numbers.append(number)
        for column, value in zip(values.values(), found, strict=True):
            column.append(value)
    return Records(np.array(numbers, np.uint64), values, rejects, weight_bytes)


def rejected(record: int, fields: Fields, reason: str) -> Records:
    """No record, and one reject."""
    no_values: dict[str, list[Any]] = {name: [] for name in fields}
    return Records(np.empty(0, np.uint64), no_values, [Reject(record, reason)])


def checked(value: Any, kind: Kind) -> Any:
    """A value as its kind is given.

    Raises:
        Unusable: It is not of this kind, or cannot be written in UTF-8.
    """
    if kind is Kind.TEXT:
        return _text(value)
    if kind is Kind.LABEL:
        return _label(value)
    if not isinstance(value, list):
        raise _not(kind, value)
    return [_text(one) if kind is Kind.WORDS else _label(one) for one in value]


def _field(row: dict[str, Any], name: str, kind: Kind) -> Any:
    if name not in row:
        raise Unusable(f"no field `{name}`")
    try:
        if isinstance(row[name], Unusable):
            raise row[name]
        return checked(row[name], kind)
    except Unusable as reason:
        raise Unusable(f"field `{name}` {reason}") from None


def _text(value: Any) -> bytes:
    if isinstance(value, bytes):
        try:
            value.decode()
        except UnicodeDecodeError as error:
            raise Unusable(f"has invalid UTF-8 at byte {error.start}") from None
        return value
    if not isinstance(value, str):
        raise _not(Kind.TEXT, value)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        reason = f"has a lone surrogate at character {error.start}: no UTF-8 can express it"
        raise Unusable(reason) from None


def _label(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | bytes):
        if not value:
            raise Unusable(f"is empty, expected {Kind.LABEL.value}")
        return _text(value).decode()
    if isinstance(value, int) and value >= 0:
        return str(value)
    raise _not(Kind.LABEL, value)


def _not(kind: Kind, value: Any) -> Unusable:
    shown = "null" if value is None else repr(value) if isinstance(value, int | float) else ""
    return Unusable(f"is {shown or type(value).__name__}, expected {kind.value}")
