"""Recipes: all that an output depends on, by the names that a user knows it by."""

from typing import Any

__all__ = ["differences"]


def differences(was: dict[str, Any], now: dict[str, Any]) -> str:
    """In words, what of two recipes differs; nothing where they are the same."""
    return "; ".join(
        f"{name} was {_shown(was.get(name))}, is {_shown(now.get(name))}"
        for name in sorted(now.keys() | was.keys())
        if now.get(name) != was.get(name)
    )


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
