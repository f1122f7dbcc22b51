"""What a setting may be, and the one line that says so where it is not."""

import math
import re
from typing import Any, get_args

import msgspec

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.settings import flag_of

__all__ = ["bounds", "check_pattern", "keeps", "require", "require_multiple", "traced_steps"]

_MOST_TRACED = 100
"""Steps; a trace of more is too large to be looked at."""


def bounds(hint: Any) -> msgspec.Meta | None:
    """The bounds that a field's type names, also where it may be None."""
    for kind in (hint, *get_args(hint)):
        for entry in getattr(kind, "__metadata__", ()):
            if isinstance(entry, msgspec.Meta):
                return entry
    return None


def keeps(value: float | str | None, limits: msgspec.Meta) -> tuple[bool, str]:
    """Whether a value is within its bounds, or a word, and in words what these are."""
    if isinstance(value, str):
        return True, ""
    if limits.gt is not None:
        return value is None or value > limits.gt, f"a number above {limits.gt}"
    assert limits.ge is not None
    below = "" if limits.lt is None else f" and below {limits.lt}"
    kept = value is None or limits.ge <= value < (math.inf if limits.lt is None else limits.lt)
    return kept, f"at least {limits.ge}{below}"


def check_pattern(pattern: str | None) -> None:
    """Refuse what is no regular expression."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ConfigError(
            f"`--trainable`={pattern}: is no regular expression ({error}). Write names, or parts "
            "of them, with | between."
        ) from error


def traced_steps(span: str) -> range:
    """The steps that --profile names, the last one included."""
    found = re.fullmatch(r"(\d+):(\d+)", span)
    steps = range(int(found[1]), int(found[2]) + 1) if found else range(0)
    if not (steps and steps[0] > 0 and len(steps) <= _MOST_TRACED):
        raise ConfigError(
            f"`--profile`={span}: expected the first and last of at most {_MOST_TRACED} steps, "
            "like 20:23."
        )
    return steps


def require(config: Any, name: str, holds: bool, expected: str) -> None:
    """Refuse the value of a setting unless it `holds`, and say what was expected."""
    if not holds:
        value = getattr(config, name)
        raise ConfigError(f"`{flag_of(name)}`: expected {expected}, got {value}.")


def require_multiple(config: Any, name: str, divisor_name: str) -> None:
    """Refuse a setting that is no multiple of another one."""
    value, divisor = getattr(config, name), getattr(config, divisor_name)
    if value % divisor:
        nearest = max(1, round(value / divisor)) * divisor
        raise ConfigError(
            f"`{flag_of(name)}`: expected a multiple of {flag_of(divisor_name)}={divisor}, got "
            f"{value}. Try {nearest}."
        )
