"""The page of a stall report, as HTML that loads nothing from anywhere."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.trainer.config.run_config import PAGE_FILE
from tokenfeed.trainer.stall import report as table

__all__ = ["render_page", "save_page", "share_of", "stall_cards"]


def render_page(
    folder: Path,
    stall: Any,
    *,
    cards: Mapping[str, str] | None = None,
    plots: Sequence[Any] = (),
    report: Any = None,
    config: Any = None,
) -> str:
    """Return the page of a run or of a loop as text.

    Args:
        folder: The folder of the run, as the page shows it.
        stall: A StallReport.
        cards: The figures at the top, by name. Default: the figures of the stall report.
        plots: Objects with a title, an explanation and an SVG.
        report: The Report of a run by `train`; None for a loop that only has a meter.
        config: The settings of the run, as YAML.
    """
    return (
        _environment()
        .get_template("page.html")
        .render(
            folder=str(folder),
            report=report,
            stall=stall,
            cards=stall_cards(stall) if cards is None else cards,
            ranks=[rank for rank in stall.ranks if rank.steps],
            late=table.late_rank(stall),
            plots=plots,
            config=config,
        )
    )


def save_page(folder: Path, page: str) -> Path:
    """Write report.html into a folder, atomically, and return its path."""
    path = folder / PAGE_FILE
    atomic_write(path, page.encode(errors="backslashreplace"))  # a path may not be UTF-8
    return path


def stall_cards(stall: Any) -> dict[str, str]:
    """Return the figures of a stall report, by name, as the page shows them."""
    speed = stall.real_tokens_per_s
    return {
        "stall": share_of(stall.stall),
        "real tokens a second": "not measured" if speed is None else f"{speed:,.0f}",
        "padding": share_of(stall.padding),
        "MFU": share_of(stall.mfu),
        "steps": f"{stall.steps:,}",
    }


def share_of(value: float | None) -> str:
    """Return a share in percent; empty if it was not measured."""
    return "" if value is None else f"{value:.2%}"


@cache
def _environment() -> Environment:
    """The templates of this folder, and what they call. All values are escaped."""
    made = Environment(
        loader=PackageLoader("tokenfeed.trainer.stall", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"format_as": format, "sentence": _sentence, "code": _code}
    made.globals |= {
        "tails": table.TAILS.values(),
        **{
            function.__name__: function
            for function in (
                table.cause_rows,
                table.gain_words,
                table.headline,
                table.main_of,
                table.not_measured,
                table.slowest_line,
            )
        },
    }
    return made


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _code(text: str) -> Markup:
    """Show what is between backticks as code."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))
