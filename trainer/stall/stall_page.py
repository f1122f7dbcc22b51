"""The page of a stall report, report.html: verdict, figures, causes, ranks, advice and plots."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.trainer.config.run_config import PAGE_FILE
from tokenfeed.trainer.stall.causes import ABOUT
from tokenfeed.trainer.stall.plots import Plot, Series, fits, stall_plot
from tokenfeed.trainer.stall.stall_report import (
    Sample,
    StallReport,
    gain_words,
    main_of,
    share_of,
    short,
)

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render_page(
    folder: Path,
    stall: StallReport,
    *,
    cards: Mapping[str, str] | None = None,
    plots: Sequence[Plot] | None = None,
    report: Any = None,
    samples: Any = None,
    lengths: Sequence[tuple[str, int, float]] = (),
    config: Any = None,
) -> str:
    """Return the page of a run or of a loop as text.

    Args:
        folder: The folder of the run, as the page shows it.
        stall: A StallReport.
        cards: The figures at the top, by name. Default: the figures of the stall report.
        plots: The plots. Default: plots of the samples of the stall report.
        report: The Report of a run by `train`; None for a loop that only has a meter.
        samples: The line of metrics.jsonl with the latest samples; None without one.
        lengths: Lengths of rows, how many rows have them, and the width of the bar, 0 to 1.
        config: The settings of the run, as YAML.
    """
    plots = sample_plots(stall.samples, stall.of_rank) if plots is None else plots
    return (
        page_templates()
        .get_template("page.html")
        .render(
            folder=str(folder),
            report=report,
            stall=stall,
            cards=stall_cards(stall) if cards is None else cards,
            facts={"run": stall.run_line, "inside": stall.inside_line},
            ranks=[rank for rank in stall.ranks if rank.steps],
            plots=[plot for plot in plots if plot.series],
            samples=samples,
            lengths=lengths,
            config=config,
        )
    )


def sample_plots(samples: Sequence[Sample], of_rank: str = "") -> list[Plot]:
    """Return the plots of a loop that only has a meter. `of_rank` is that of its report."""
    start = Sample(step=0, steps=0, seconds=0.0, tokens=0, causes={})
    shares: list[tuple[int, dict[str, float]]] = []
    times, speeds = Series("mean", [], []), Series("tokens/s", [], [])
    for before, after in pairwise([start, *samples]):
        steps, seconds = after.steps - before.steps, after.seconds - before.seconds
        if steps <= 0 or seconds <= 0 or not fits(seconds) or not fits(after.tokens / seconds):
            continue
        # The estimate of idle time inside the work may fall as more of it is known.
        idle = {each: part - before.causes.get(each, 0.0) for each, part in after.causes.items()}
        shares.append((after.step, {c: max(0.0, x) / seconds for c, x in idle.items() if fits(x)}))
        times.add(after.step, seconds / steps)
        if after.tokens > before.tokens:
            speeds.add(after.step, (after.tokens - before.tokens) / seconds)
    return [
        stall_plot(shares),
        Plot(
            "Seconds a step",
            "Mean of the steps since the point before. It should be flat: a peak is an evaluation, "
            "a checkpoint, or another program on the machine.",
            [times],
        ),
        Plot(f"Real tokens a second{of_rank}", "Without padding, stall included.", [speeds]),
    ]


def save_page(folder: Path, page: str, name: str = PAGE_FILE) -> Path:
    """Write a page into a folder, atomically, and return its path."""
    path = folder / name
    atomic_write(path, page.encode(errors="backslashreplace"))  # a path may not be UTF-8
    return path


def stall_cards(stall: StallReport) -> dict[str, str]:
    """Return the figures of a stall report, by name, as the page shows them."""
    of_rank, name = stall.of_rank, "real tokens a second"
    speeds = {
        f"{name} on all {stall.world_size} ranks": stall.all_tokens_per_s if of_rank else None,
        f"{name}{of_rank}": stall.real_tokens_per_s,
    }
    return {
        f"stall{f' of rank {stall.rank}' * (stall.world_size > 1)}": stall.stall_share,
        **{name: "" if speed is None else f"{speed:,.0f}" for name, speed in speeds.items()},
        f"padding{of_rank}": share_of(stall.padding),
        f"MFU{of_rank}": share_of(stall.mfu),
        "steps": f"{stall.steps:,}",
    }


@cache
def page_templates() -> "Environment":
    """Return the templates of this folder and the functions that they call. Escapes values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only for pages: slow to import

    made = Environment(
        loader=PackageLoader("tokenfeed.trainer.stall", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"format_as": format, "sentence": _sentence, "code": _code, "short": short}
    made.globals |= {"about": ABOUT, "gain_words": gain_words, "main_of": main_of}
    return made


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _code(text: str) -> "Markup":
    """Mark up text between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))
