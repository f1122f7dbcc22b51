"""Records: what the readers give, whatever file they read.

A record is a text file, a line of JSON Lines or CSV, a row of Parquet or Arrow. A bad one costs
itself only and becomes a reject. Readers give many at once, field by field; a field has a kind,
and `kinds.checker` decides, for every format alike, whether a value is of that kind.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tokenfeed.tools.corpus.kinds import Fields, Unusable, checker

__all__ = ["Records", "Reject", "records_of", "rejected", "shown_names", "too_long"]

_LONGEST_NAMES = 200
"""Characters."""


class Reject(NamedTuple):
    """A record that could not be used."""

    record: int
    reason: str


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
    checks = {name: checker(kind) for name, kind in fields.items()}
    numbers: list[int] = []
    values: dict[str, list[Any]] = {name: [] for name in fields}
    rejects: list[Reject] = []
    for number, row in rows:
        try:
            if isinstance(row, Unusable):
                raise row
            found = [_field(row, name, check) for name, check in checks.items()]
        except Unusable as reason:
            rejects.append(Reject(number, str(reason)))
            continue
        numbers.append(number)
        for column, value in zip(values.values(), found, strict=True):
            column.append(value)
    return Records(np.array(numbers, np.uint64), values, rejects, weight_bytes)


def shown_names(names: Iterable[str]) -> str:
    """The names of fields for an error: all, or as many as fit into a line."""
    shown = ", ".join(names) or "no fields"
    return shown if len(shown) <= _LONGEST_NAMES else f"{shown[:_LONGEST_NAMES]}..."


def too_long(num_bytes: int, most_bytes: int) -> str:
    """The reason for rejecting a record, or a field."""
    return f"has {num_bytes:,} bytes, more than the {most_bytes:,} of `--max-record`"


def rejected(record: int, fields: Fields, reason: str) -> Records:
    """No record, and one reject."""
    no_values: dict[str, list[Any]] = {name: [] for name in fields}
    return Records(np.empty(0, np.uint64), no_values, [Reject(record, reason)])


def _field(row: dict[str, Any], name: str, check: Callable[[Any], Any]) -> Any:
    if name not in row:
        raise Unusable(f"no field `{name}`; it has: {shown_names(row)}")
    try:
        if isinstance(row[name], Unusable):
            raise row[name]
        return check(row[name])
    except Unusable as reason:
        raise Unusable(f"field `{name}` {reason}") from None
