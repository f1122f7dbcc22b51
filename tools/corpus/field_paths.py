r"""Values inside fields, and texts made of several fields: names of `--field` that are no column.

    translation.en             the value of the key en of an object
    answers.text[0]            the first item of a list in an object; [-1] is the last item
    {context}\n{question}      a text made of several values

`{name}` stands for a value, `\n` for a line break, `\t` for a tab, `\\`, `{{` and `}}` for one
character. Within a text, numbers are written as in JSON, and null is empty. Formats read whole
columns, so only the columns with other names take the fast ways of `records`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools.corpus.records import (
    RAW_KINDS,
    FieldKind,
    Fields,
    Records,
    Reject,
    Unusable,
    checker,
    listed,
    shown_names,
)

_PATH = re.compile(r"([^.\[\]{}]+)((?:\.[^.\[\]{}]+|\[-?[0-9]{1,9}\])*)")
_STEP = re.compile(r"\.([^.\[\]{}]+)|\[(-?[0-9]+)\]")
_PIECE = re.compile(r"\{([^{}]+)\}|(\{\{|\}\}|\\[nt\\])|([^{}\\]+|\\)|([{}])")
_ESCAPES = {"{{": "{", "}}": "}", r"\n": "\n", r"\t": "\t", "\\\\": "\\"}


@dataclass(frozen=True, slots=True)
class _Path:
    """A value inside a column."""

    name: str
    column: str
    steps: tuple[str | int, ...]

    @classmethod
    def parse(cls, name: str) -> "_Path | None":
        """Return the path of a name; None if the name is not a path."""
        if not (found := _PATH.fullmatch(name)):
            return None
        steps = (step or int(index) for step, index in _STEP.findall(found[2]))
        return cls(name, found[1], tuple(steps))

    def of(self, value: Any) -> Any:
        """Return the value inside the value of the column.

        Raises:
            Unusable: There is no such value.
        """
        for step in self.steps:
            expected = dict if isinstance(step, str) else list
            if not isinstance(value, expected):
                shown = "null" if value is None else type(value).__name__
                has = "an object" if expected is dict else "a list"
                raise Unusable(f"`{self.name}` needs {has} before {step!r}, got {shown}")
            held: Any = value
            try:
                value = held[step]
            except KeyError:
                raise Unusable(
                    f"`{self.name}`: no `{step}`; it has: {shown_names(value)}"
                ) from None
            except IndexError:
                raise Unusable(f"`{self.name}`: the list has {len(held):,} item(s)") from None
        return value


@dataclass(frozen=True, slots=True)
class _Formula:
    """A name with braces."""

    pieces: tuple[str | _Path, ...]

    @property
    def paths(self) -> Iterator[_Path]:
        return (piece for piece in self.pieces if isinstance(piece, _Path))

    def checked(self, name: str, row: dict[str, Any], check: Callable[[Any], Any]) -> Any:
        """Return the value of a row: a text, or any value if the formula is one path.

        Raises:
            Unusable: There is no such value, or `check` raises it.
        """
        value: Any = None
        if len(self.pieces) == 1:
            (path,) = self.paths
            value, name = path.of(row[path.column]), path.name
        else:
            value = "".join(
                piece if isinstance(piece, str) else _text(piece.of(row[piece.column]), piece.name)
                for piece in self.pieces
            )
        try:
            return check(value)
        except Unusable as reason:
            raise Unusable(f"`{name}` {reason}") from None


def _text(value: Any, name: str) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return json.dumps(value)
    if isinstance(value, Decimal):
        return f"{value:f}"
    if value is not None:
        raise Unusable(f"`{name}` is {type(value).__name__}, expected a text or a number")
    return ""


@cache
def _formula(name: str) -> _Formula:
    """Parse a name with braces.

    Raises:
        ConfigError: The braces do not match, or contain no path.
    """
    pieces: list[str | _Path] = []
    for inside, escape, text, brace in _PIECE.findall(name):
        path = _Path.parse(inside) if inside else None
        if brace or (inside and not path):
            raise ConfigError(
                f"`--field` {name!r}: expected names of fields in braces, like "
                r"'{context}\n{answers.text[0]}', and {{ or }} for a brace in the text."
            )
        piece: str | _Path = path or _ESCAPES.get(escape) or text
        pieces.append(piece)
    if not any(isinstance(piece, _Path) for piece in pieces):
        raise ConfigError(f"`--field` {name!r}: names no field in braces.")
    return _Formula(tuple(pieces))


def is_formula(name: str) -> bool:
    """Return whether a name has braces, so that it is computed from columns."""
    return "{" in name or "}" in name


def nested(name: str) -> str:
    """Return the formula of a path like `translation.en`; empty if the name is not such a path."""
    path = None if is_formula(name) else _Path.parse(name)
    return f"{{{name}}}" if path and path.steps else ""


def check_name(name: str) -> None:
    """Raise ConfigError if a name of `--field` has braces that cannot be read."""
    if is_formula(name):
        _formula(name)


def columns_of(fields: Fields) -> Fields:
    """Return the columns to read for fields, of which some may be formulas."""
    columns = {name: kind for name, kind in fields.items() if not is_formula(name)}
    for name, kind in fields.items():
        if is_formula(name):
            any_kind = kind if kind in RAW_KINDS else FieldKind.ANY
            for path in _formula(name).paths:
                columns.setdefault(path.column, any_kind)
    return columns


def possible_columns(fields: Fields) -> Fields:
    """Return the columns to read before it is known whether a name like `a.b` is a column."""
    paths = {formula: FieldKind.OPTIONAL_JSON for name in fields if (formula := nested(name))}
    given = {n: FieldKind.OPTIONAL_JSON if nested(n) else kind for n, kind in fields.items()}
    return columns_of(paths) | columns_of(given)


def computed(records: Iterable[Records], fields: Fields) -> Iterator[Records]:
    """Yield the records of the columns of `columns_of` with the wanted fields. A record without a
    value for some formula is rejected."""
    formulas = {name: _formula(name) for name in fields if is_formula(name)}
    checks = {name: checker(fields[name]) for name in formulas}
    for each in records:
        columns = each.fields
        made: dict[str, list[Any]] = {name: [] for name in formulas}
        kept: list[int] = []
        rejects = [*each.rejects]
        for place, values in enumerate(zip(*map(listed, columns.values()), strict=True)):
            row = dict(zip(columns, values, strict=True))
            try:
                found = [formulas[name].checked(name, row, check) for name, check in checks.items()]
            except Unusable as reason:
                rejects.append(Reject(int(each.numbers[place]), f"field {reason}"))
                continue
            kept.append(place)
            for column, value in zip(made.values(), found, strict=True):
                column.append(value)
        left = each.take(np.array(kept, np.int64))
        all_fields = left.fields | made
        yield replace(left, fields={name: all_fields[name] for name in fields}, rejects=rejects)
