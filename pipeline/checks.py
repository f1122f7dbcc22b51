"""Settings at the door: each check gives the value as the rest of the code wants it, or refuses it
with one line.

What passes is a plain int, float, bool or str, whatever number type it came as (numpy's are taken),
so that a plan compares and a state is saved the same for all of them. Torch-free.
"""

import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from tokenfeed.pipeline.errors import ConfigError

__all__ = [
    "MOST",
    "as_int",
    "choice",
    "epochs",
    "flag",
    "number",
    "refusal",
    "seed",
    "share",
    "text",
    "whole",
]

MOST = 2**31 - 1
"""Rows, tokens or micro-batches of what is held in memory at once: places in it are int32."""

_LARGEST = 2**63 - 1
_SHOWN = 60
Choice = TypeVar("Choice", bound=str)


def whole(
    name: str, value: object, *, least: int = 0, most: int = _LARGEST, other: str = ""
) -> int:
    """A whole number in a range; `other` says what else would be taken.

    Raises:
        ConfigError: It is no whole number, or out of range.
    """
    checked = as_int(value)
    if checked is None or not least <= checked <= most:
        limits = f", at least {least}" if most == _LARGEST else f" from {least} to {most:,}"
        raise refusal(name, value, f"a whole number{limits}{other}")
    return checked


def seed(value: object) -> int:
    """A seed: any whole number.

    Raises:
        ConfigError: It is no whole number.
    """
    checked = as_int(value)
    if checked is None:
        raise refusal("seed", value, "a whole number")
    return checked


def epochs(value: object) -> int | None:
    """Epochs of a pass; None for no end.

    Raises:
        ConfigError: It is neither, or a pass without an epoch.
    """
    return None if value is None else whole("epochs", value, least=1, other=", or None for no end")


def as_int(value: Any) -> int | None:
    """A whole number of any type as an int; None for everything else, True and 2.0 among it."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def number(name: str, value: object, *, unit: str) -> float:
    """A number above 0 of some unit, infinity included.

    Raises:
        ConfigError: It is no number, or not above 0.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise refusal(name, value, f"{unit}, more than 0; float('inf') sets no limit")
    return float(value)


def share(name: str, value: object) -> float:
    """A number from 0 to 1.

    Raises:
        ConfigError: It is no number, or out of range.
    """
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not is_real or not 0 <= value <= 1:  # type: ignore[operator]  # too large for a float
        raise refusal(name, value, "a number from 0 to 1")
    return float(value)  # type: ignore[arg-type]


def flag(name: str, value: object) -> bool:
    """True or False.

    Raises:
        ConfigError: It is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise refusal(name, value, "True or False")
    return bool(value)


def text(name: str, value: object) -> str:
    """A string.

    Raises:
        ConfigError: It is no string.
    """
    if not isinstance(value, str):
        raise refusal(name, value, "a string")
    return str(value)


def choice(name: str, value: object, choices: Sequence[Choice]) -> Choice:
    """One of a few words.

    Raises:
        ConfigError: It is none of them.
    """
    for word in choices:
        if isinstance(value, str) and value == word:
            return word
    raise refusal(name, value, " or ".join(map(repr, choices)))


def refusal(name: str, value: object, expected: str) -> ConfigError:
    """The error for a setting that is not what was expected; one line, whatever the value is."""
    shown = " ".join(repr(value).split())
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    return ConfigError(f"`{name}`={shown}: expected {expected}.")
