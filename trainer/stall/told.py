"""What a loop says to a meter, refused in one line where it is something else."""

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from os import PathLike
from typing import Any

from tokenfeed.pipeline.checks import refusal
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.stall.causes import CAUSES

__all__ = [
    "check_batches",
    "check_cause",
    "check_exchange",
    "check_folder",
    "operations",
    "remedies",
    "whole",
]

_NOT_CAUSES = ("work", "exchange", "padding")
"""What reports advise on besides causes."""


def whole(name: str, value: object, *, least: int = 0) -> int:
    """A whole number that is on the host: to ask a tensor would wait for its device."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise refusal(name, value, "a whole number; of a tensor `int(...)`, which waits for it")
    if value < least:
        raise refusal(name, value, f"at least {least}")
    return int(value)


def operations(value: object) -> float | None:
    """Operations of a token, where they are known."""
    if value is not None and (not isinstance(value, Real) or not 0 < float(value) < math.inf):
        raise refusal("operations_per_token", value, "a finite number above 0, or None")
    return None if value is None else float(value)


def remedies(value: Any) -> Mapping[str, str]:
    """Validate the advice by cause. A name that no report reads would be advice never shown."""
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise refusal("remedies", value, "a dict of advice by cause, or None")
    if unknown := value.keys() - {*CAUSES, *_NOT_CAUSES}:
        known = ", ".join((*CAUSES, *_NOT_CAUSES))
        raise ConfigError(f"`remedies` has {min(map(str, unknown))!r}: expected names of {known}.")
    return value


def check_cause(call: str, name: object) -> None:
    """A cause, or a ConfigError."""
    if name not in CAUSES:
        raise ConfigError(f"`{call}({name!r})`: expected one of {', '.join(CAUSES)}.")


def check_batches(batches: object) -> None:
    """Something to iterate over, or a ConfigError."""
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise refusal("batches", batches, "a loader, or any other iterable")


def check_exchange(exchange: Any) -> None:
    """A function, or a ConfigError."""
    if exchange is not None and not callable(exchange):
        raise refusal("exchange", exchange, "a function of a list of numbers, or None")


def check_folder(folder: object) -> None:
    """A path, or a ConfigError."""
    if not isinstance(folder, str | PathLike):
        raise refusal("folder", folder, "a path")
