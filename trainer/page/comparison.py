"""Two runs side by side: what they were worth, what the device waited for, what differs in their
settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenfeed.trainer.page.run_data import RunData
from tokenfeed.trainer.settings import flag_of

__all__ = ["Comparison", "Row", "compare"]

_OF_EVERY_RUN = ("run_dir", "resume", "json")
_FIGURES: dict[str, tuple[str, str]] = {
    "real tokens a second": ("real_tokens_per_s", ",.0f"),
    "padding": ("padding", ".2%"),
    "steps": ("steps", ",d"),
    "skipped steps": ("skipped_steps", ",d"),
    "real tokens": ("tokens", ",d"),
    "seconds": ("seconds", ",.1f"),
    "loss": ("loss_last", ".4f"),
    "validation loss": ("validation_loss_last", ".4f"),
    "best step": ("best_step", ",d"),
    "model": ("model", ""),
    "parameters": ("parameters", ",d"),
    "precision": ("precision", ""),
    "device": ("device", ""),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One thing of both runs."""

    name: str
    one: str
    other: str
    change: str
    """Of a figure, in per cent of the first; empty where there is none."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows of three tables."""

    figures: list[Row]
    causes: list[Row]
    """Share of the time, by cause."""
    settings: list[Row]
    """Only those that differ."""


def compare(one: RunData, other: RunData) -> Comparison:
    """The second run beside the first."""
    return Comparison(
        figures=[
            *_figures(one.report, other.report),
            *_metrics(one.report, other.report),
        ],
        causes=list(_causes(one.report["stall"], other.report["stall"])),
        settings=list(_settings(one.settings, other.settings)),
    )


def _figures(one: dict[str, Any], other: dict[str, Any]) -> Iterator[Row]:
    for name, (key, form) in _FIGURES.items():
        a, b = one.get(key), other.get(key)
        if a or b:
            yield _row(name, a, b, form)


def _metrics(one: dict[str, Any], other: dict[str, Any]) -> Iterator[Row]:
    """By split and name; of a name that one run lacks, the other's."""
    first, second = (_flat(report.get("metrics") or {}) for report in (one, other))
    for name in dict.fromkeys((*first, *second)):
        yield _row(name, first.get(name), second.get(name), ".4f")


def _flat(metrics: dict[str, dict[str, float]]) -> dict[str, float]:
    return {
        f"{split} {name}": value
        for split, found in metrics.items()
        for name, value in found.items()
    }


def _causes(one: dict[str, Any], other: dict[str, Any]) -> Iterator[Row]:
    yield _row("stall", one["fraction"], other["fraction"], ".2%")
    first, second = one["parts"], other["parts"]
    for cause in dict.fromkeys((*first, *second)):
        a, b = (parts.get(cause, {}).get("fraction", 0.0) for parts in (first, second))
        if a or b:
            yield _row(cause, a, b, ".2%")


def _settings(one: dict[str, Any], other: dict[str, Any]) -> Iterator[Row]:
    for name in dict.fromkeys((*one, *other)):
        a, b = one.get(name), other.get(name)
        if a != b and name not in _OF_EVERY_RUN:
            yield Row(flag_of(name), _said(a), _said(b), "")


def _row(name: str, a: Any, b: Any, form: str) -> Row:
    return Row(name, _shown(a, form), _shown(b, form), _change(a, b))


def _shown(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def _said(value: Any) -> str:
    return "not set" if value is None else str(value)


def _change(a: Any, b: Any) -> str:
    if not (isinstance(a, int | float) and isinstance(b, int | float)) or not a or a == b:
        return ""
    return f"{b / a - 1:+.1%}"
