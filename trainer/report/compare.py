"""Two runs side by side: figures, stall by cause, and the settings that differ.

Runs may have trained for unequal times, so only rates, shares, and losses at equal steps get a
change.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenfeed.trainer.config.values import flag_of
from tokenfeed.trainer.report.run_folder import RunData
from tokenfeed.trainer.report.run_report import Report
from tokenfeed.trainer.stall.report import StallReport, shown_causes

_OF_EVERY_RUN = ("run_dir", "resume", "json", "export")
Figure = tuple[Any, str]
"""A value and its format."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both runs."""

    name: str
    one: str
    other: str
    change: str
    """Relative to the first run; empty for figures that cannot be compared."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows of three tables."""

    figures: list[Row]
    causes: list[Row]
    """Share of the time, by cause."""
    settings: list[Row]
    """Settings that differ."""


def compare(one: RunData, other: RunData) -> Comparison:
    """Compare the second run with the first."""
    return Comparison(
        figures=[
            *_rows(_rates(one.stall), _rates(other.stall), _change),
            *_loss("loss", one, other),
            *_loss("validation loss", one, other),
            *_rows(_metrics(one.report), _metrics(other.report), _change),
            *_rows(_facts(one), _facts(other), lambda a, b: ""),
        ],
        causes=list(_rows(_shares(one.stall, other), _shares(other.stall, one), _points)),
        settings=list(_settings(one.settings, other.settings)),
    )


def _rates(stall: StallReport) -> dict[str, Figure]:
    seconds = stall.seconds / stall.steps if stall.steps else None
    return {
        "real tokens a second": (stall.real_tokens_per_s, ",.0f"),
        "seconds a step": (seconds, ".4g"),
        "padding": (stall.padding, ".2%"),
    }


def _facts(run: RunData) -> dict[str, Figure]:
    """Figures that depend on the length of a run, and text."""
    if (report := run.report) is None:
        return {"measured steps": (run.stall.steps, ",d"), "device": (run.stall.device, "")}
    return {
        "steps": (report.steps, ",d"),
        "skipped steps": (report.skipped_steps or None, ",d"),
        "real tokens": (report.tokens, ",d"),
        "seconds": (report.seconds, ",.1f"),
        "best step": (report.best_step, ",d"),
        "model": (report.model, ""),
        "parameters": (report.parameters, ",d"),
        "precision": (report.precision, ""),
        "device": (report.device, ""),
    }


def _loss(name: str, one: RunData, other: RunData) -> Iterator[Row]:
    """The loss at the last step that both runs have logged; else the last loss of each run."""
    both = [run.series(name, name.replace(" ", "_")) for run in (one, other)]
    first, second = (dict(zip(series.xs, series.ys, strict=True)) for series in both)
    if common := first.keys() & second.keys():
        step = max(common)
        title = f"{name} at step {step:,.0f}"
        yield from _rows({title: (first[step], ".4f")}, {title: (second[step], ".4f")}, _change)
    elif first or second:
        a, b = (f"{ys[max(ys)]:.4f} at step {max(ys):,.0f}" if ys else "" for ys in (first, second))
        yield Row(name, a, b, "")


def _metrics(report: Report | None) -> dict[str, Figure]:
    """Metrics of the best weights by split and name. The validation loss has a row already."""
    return {
        f"{split} {name}": (value, ".4f")
        for split, metrics in (report.metrics if report else {}).items()
        for name, value in metrics.items()
        if (split, name) != ("validation", "loss")
    }


def _shares(stall: StallReport, beside: RunData) -> dict[str, Figure]:
    """The stall, and the share of each cause that shows in one of the runs."""
    names = dict.fromkeys((*shown_causes(stall), *shown_causes(beside.stall)))
    causes = {name: stall.causes[name].fraction for name in names if name in stall.causes}
    shares = {"stall": stall.stall} | dict.fromkeys(names, 0.0) | causes
    return {name: (share, ".2%") for name, share in shares.items()}


def _settings(one: dict[str, Any], other: dict[str, Any]) -> Iterator[Row]:
    for name in dict.fromkeys((*one, *other)):
        pair = [one.get(name), other.get(name)]
        if pair[0] != pair[1] and name not in _OF_EVERY_RUN:
            a, b = ("not set" if each in (None, "null") else str(each) for each in pair)
            yield Row(flag_of(name), a, b, "")


def _rows(
    one: dict[str, Figure], other: dict[str, Figure], change: Callable[[Any, Any], str]
) -> Iterator[Row]:
    """Yield a row for each name with a value in one of the runs."""
    for name in dict.fromkeys((*one, *other)):
        pair = [figures.get(name, (None, "")) for figures in (one, other)]
        a, b = ("" if value is None else format(value, form) for value, form in pair)
        if a or b:
            yield Row(name, a, b, change(pair[0][0], pair[1][0]) if a and b else "")


def _change(a: float, b: float) -> str:
    return f"{b / a - 1:+.1%}" if a and a != b else ""


def _points(a: float, b: float) -> str:
    return f"{100 * (b - a):+.2f} points" if abs(b - a) >= 5e-5 else ""
