"""report.html of a run: figures, stall by cause, what to change, and plots over the steps."""

import re
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.trainer.config import PAGE_FILE
from tokenfeed.trainer.page.plots import Bars, Plot, Series, short
from tokenfeed.trainer.page.run_folder import RunData
from tokenfeed.trainer.report import Report
from tokenfeed.trainer.stall import table
from tokenfeed.trainer.stall.report import StallReport

__all__ = ["page_of", "write_page"]

_MOST_CAUSES = 6
"""Areas that can be told apart. Smaller causes are summed."""


def write_page(folder: Path) -> Path:
    """Write report.html of a run, atomically, from the files in its folder.

    Raises:
        ConfigError: The folder holds no report.
    """
    path = folder / PAGE_FILE
    page = page_of(RunData.of_folder(folder))
    atomic_write(path, page.encode(errors="backslashreplace"))  # a path may not be UTF-8
    return path


def page_of(run: RunData) -> str:
    """Return the page as text. It loads nothing from anywhere."""
    report, stall = run.report, run.stall
    plots = [plot for plot in _plots(run) if plot.series]
    return (
        _environment()
        .get_template("page.html")
        .render(
            folder=str(run.folder),
            report=report,
            stall=stall,
            cards=_cards_of_loop(stall) if report is None else _cards(report),
            ranks=[rank for rank in stall.ranks if rank.steps],
            late=table.late_rank(stall),
            plots=plots,
            config=run.config,
        )
    )


@cache
def _environment() -> Environment:
    """The templates of this folder, and what they call. All values are escaped."""
    made = Environment(
        loader=PackageLoader("tokenfeed.trainer.page", "."),
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


def _cards(report: Report) -> dict[str, str]:
    return {
        **_cards_of_loop(report.stall),
        "padding": _share(report.padding),
        "loss": _figure(report.loss_last),
        "validation loss": _figure(report.validation_loss_last),
        "steps": f"{report.steps:,}",
        "real tokens": short(report.tokens),
        **_metrics(report),
    }


def _cards_of_loop(stall: StallReport) -> dict[str, str]:
    speed = stall.real_tokens_per_s
    return {
        "stall": _share(stall.stall),
        "real tokens a second": "not measured" if speed is None else f"{speed:,.0f}",
        "padding": _share(stall.padding),
        "MFU": _share(stall.mfu),
        "steps": f"{stall.steps:,}",
    }


def _metrics(report: Report) -> dict[str, str]:
    """Metrics of the last split that was measured. The loss has a card already."""
    split = next(reversed(report.metrics), "")
    return {
        f"{name.replace('_', ' ')}, {split}": f"{value:.4g}"
        for name, value in report.metrics.get(split, {}).items()
        if name != "loss" and value is not None
    }


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _plots(run: RunData) -> list[Plot | Bars]:
    return [
        Plot(
            "Stall by cause",
            "Share of the time between two progress lines in which the device had nothing to do. "
            "A tall area is worth looking at: the table above says what to do about its cause.",
            _causes(run.causes()),
            stacked=True,
            format=lambda share: f"{share:.3g}" if share == 0 else f"{share:.1%}",
        ),
        Plot(
            "Real tokens a second",
            "Without padding, stall included. It should be flat: a dip is an evaluation, a "
            "checkpoint, or another program on the machine.",
            [run.series("tokens/s", "real_tokens_per_s")],
        ),
        Plot(
            "Loss",
            "Mean per target since the line before, and on the validation split. If the second "
            "rises while the first falls, the model memorizes its training data.",
            [run.series("training", "loss"), run.series("validation", "validation_loss")],
            from_zero=False,
        ),
        Plot(
            "Seconds a step",
            "Half of the steps since the line before took less than p50; max is the longest one. "
            "A max far above p50 is a step that waited.",
            [run.series("p50", "step_seconds.p50"), run.series("max", "step_seconds.max")],
        ),
        Plot(
            "Gradient norm",
            "Before clipping. A jump is an unusual batch, or a learning rate that is too high.",
            [run.series("norm", "gradient_norm")],
        ),
        Plot(
            "Learning rate",
            "From the schedule.",
            [run.series("rate", "learning_rate")],
            format=lambda rate: f"{rate:.2g}",
        ),
        Plot(
            "GPU memory, GB",
            "In use by all programs on the GPU. Near the top, running out of memory is near too.",
            [run.series("memory", "gpu.memory_bytes", factor=1e-9)],
        ),
        Plot(
            "GPU power, W",
            "Read from NVML at progress lines. Far below the limit, the GPU has little to do.",
            [run.series("power", "gpu.power_watts")],
        ),
        Bars(
            "Rows by length",
            "Of the training split, in tokens. The wider this is, the more a batch of any rows "
            "would pad: rows of like length are put together, or packed.",
            run.report.rows_by_length if run.report else (),
        ),
    ]


def _causes(lines: list[tuple[int, dict[str, float]]]) -> list[Series]:
    """The largest causes, and the sum of the others."""
    totals: dict[str, float] = {}
    for _, causes in lines:
        for cause, share in causes.items():
            totals[cause] = totals.get(cause, 0.0) + share
    named = sorted((cause for cause in totals if totals[cause]), key=lambda cause: -totals[cause])
    shown = named if len(named) <= _MOST_CAUSES + 1 else named[:_MOST_CAUSES]
    groups = {cause: [cause] for cause in shown}
    if len(shown) < len(named):
        groups["the rest"] = named[_MOST_CAUSES:]
    steps = [step for step, _ in lines]
    return [
        Series(name, steps, [sum(found.get(cause, 0.0) for cause in causes) for _, found in lines])
        for name, causes in groups.items()
    ]
