"""Check arguments and options: convert a value to its plain type, or reject it in one line.

Numbers of numpy become a plain int, float or bool, so that plans compare equal and states are saved
the same for all number types. Torch-free.
"""

import operator
import re
from collections.abc import Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from tokenfeed.pipeline.errors import ConfigError

MOST = 2**31 - 1
"""Most rows, tokens or micro-batches in memory at once: their positions are int32."""

_LARGEST = 2**63 - 1
_SHOWN = 60
Choice = TypeVar("Choice", bound=str)


def whole(
    name: str, value: object, *, least: int = 0, most: int = _LARGEST, other: str = ""
) -> int:
    """Return a whole number in a range; `other` names another accepted value, for the error.

    Raises:
        ConfigError: The value is not a whole number, or is out of range.
    """
    checked = as_int(value)
    if checked is None or not least <= checked <= most:
        limits = f", at least {least}" if most == _LARGEST else f" from {least} to {most:,}"
        raise refusal(name, value, f"a whole number{limits}{other}")
    return checked


def seed(value: object) -> int:
    """Return a seed: any whole number.

    Raises:
        ConfigError: The value is not a whole number.
    """
    checked = as_int(value)
    if checked is None:
        raise refusal("seed", value, "a whole number")
    return checked


def epochs(value: object) -> int | None:
    """Return the number of epochs; None for no end.

    Raises:
        ConfigError: The value is not None or a whole number of at least 1.
    """
    return None if value is None else whole("epochs", value, least=1, other=", or None for no end")


def as_int(value: Any) -> int | None:
    """Return a whole number of any type as an int; None for other values, such as True and 2.0."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def number(name: str, value: object, *, unit: str) -> float:
    """Return a number above 0, in the given unit. Infinity is allowed.

    Raises:
        ConfigError: The value is not a number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise refusal(name, value, f"{unit}, more than 0; float('inf') sets no limit")
    return float(value)


def share(name: str, value: object) -> float:
    """Return a number from 0 to 1.

    Raises:
        ConfigError: The value is not a number, or is out of range.
    """
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not is_real or not 0 <= value <= 1:  # type: ignore[operator]  # too large for a float
        raise refusal(name, value, "a number from 0 to 1")
    return float(value)  # type: ignore[arg-type]


def flag(name: str, value: object) -> bool:
    """Return True or False.

    Raises:
        ConfigError: The value is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise refusal(name, value, "True or False")
    return bool(value)


def text(name: str, value: object) -> str:
    """Return a string.

    Raises:
        ConfigError: The value is not a string.
    """
    if not isinstance(value, str):
        raise refusal(name, value, "a string")
    return str(value)


def choice(name: str, value: object, choices: Sequence[Choice]) -> Choice:
    """Return one of a few words.

    Raises:
        ConfigError: The value is another one.
    """
    for word in choices:
        if isinstance(value, str) and value == word:
            return word
    raise refusal(name, value, " or ".join(map(repr, choices)))


def refusal(name: str, value: object, expected: str) -> ConfigError:
    """Return the error for an unexpected value, in one line for any value."""
    shown = " ".join(repr(value).split())
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    return ConfigError(f"`{name}`={shown}: expected {expected}.")


_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def bytes_meant(size: str) -> int | None:
    """Return the bytes of a whole number with or without a unit; None if it is not a size."""
    match = re.fullmatch(r"(\d{1,18}) ?([KMG]i?B)?", size, re.IGNORECASE)
    return int(match[1]) * _UNITS[(match[2] or "B").upper()] if match else None
