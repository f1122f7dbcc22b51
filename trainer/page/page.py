"""The page of a run: its figures, what the device waited for, what to change, how it went."""

import re
from html import escape
from importlib import resources
from pathlib import Path

from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.trainer.config import PAGE_FILE
from tokenfeed.trainer.page.bars import draw_bars
from tokenfeed.trainer.page.causes import cause_table
from tokenfeed.trainer.page.plot import Plot, Series, draw
from tokenfeed.trainer.page.ranks import rank_table
from tokenfeed.trainer.page.run_data import RunData
from tokenfeed.trainer.page.scale import short
from tokenfeed.trainer.report import Report
from tokenfeed.trainer.stall.report import StallReport
from tokenfeed.trainer.stall.table import gain_words

__all__ = ["page_of", "write_page"]

_MOST_CAUSES = 6
"""Areas that can be told apart; smaller ones are summed."""


def write_page(folder: Path) -> Path:
    """Write report.html of a run, atomically, from the files in its folder.

    Raises:
        ConfigError: The folder holds no report.
    """
    path = folder / PAGE_FILE
    page = page_of(RunData.of_folder(folder))
    atomic_write(path, page.encode(errors="backslashreplace"))  # a path may be no UTF-8
    return path


def page_of(run: RunData) -> str:
    """The page as text. It loads nothing from anywhere."""
    style = resources.files("tokenfeed.trainer.page").joinpath("style.css").read_text()
    name, report = escape(str(run.folder)), run.report
    about = run.stall.device if report is None else _about(report)
    cards = _cards_of_loop(run.stall) if report is None else _cards(report)
    lengths = draw_bars(report.rows_by_length) if report else ""
    plots = "".join(map(draw, _plots(run))) + lengths
    went = f"<h2>How the run went</h2><div class=plots>{plots}</div>" if plots else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name} · tokenfeed</title><style>{style}</style></head><body><main>"
        f"<h1>{name}</h1><p class=soft>{escape(about)}</p>"
        f"<div class=cards>{''.join(_card(*card) for card in cards.items() if card[1])}</div>"
        f"<h2>What the device waited for</h2>{cause_table(run.stall)}"
        f"{rank_table(run.stall)}{_advice(run.stall)}{went}{_settings(run)}</main></body></html>\n"
    )


def _about(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts = "" if report.parts == 1 else f" Trained in {report.parts} parts; all figures cover all."
    end = "" if report.finished else " It was stopped before its end."
    return (
        f"{report.model}, {report.parameters / 1e6:.1f} M parameters, task {report.task}, "
        f"{report.precision} on {report.device}; {versions}.{parts}{end}"
    )


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


def _card(name: str, value: str) -> str:
    return f"<div><span class=soft>{escape(name)}</span><b>{value}</b></div>"


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


def _advice(stall: StallReport) -> str:
    if stall.stall is None:
        return ""
    if not stall.advice:
        return "<p>Nothing to advise: feeding is not the problem.</p>"
    items = "".join(
        f"<li>{_code(piece.text)} <b>({gain_words(piece.gain)})</b></li>" for piece in stall.advice
    )
    return f"<h3>What to change</h3><ul class=advice>{items}</ul>"


def _code(text: str) -> str:
    """Text in which backticks mean code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def _plots(run: RunData) -> list[Plot]:
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
            [run.series("tokens/s", lambda line: line.real_tokens_per_s)],
        ),
        Plot(
            "Loss",
            "Mean per target since the line before, and on the validation split. If the second "
            "rises while the first falls, the model memorizes its training data.",
            [
                run.series("training", lambda line: line.loss),
                run.series("validation", lambda line: line.validation_loss),
            ],
            from_zero=False,
        ),
        Plot(
            "Seconds a step",
            "Half of the steps since the line before took less than p50; max is the longest one. "
            "A max far above p50 is a step that waited.",
            [
                run.series(
                    "p50", lambda line: line.step_seconds.p50 if line.step_seconds else None
                ),
                run.series(
                    "max", lambda line: line.step_seconds.max if line.step_seconds else None
                ),
            ],
        ),
        Plot(
            "Gradient norm",
            "Before clipping. A jump is an unusual batch, or a learning rate that is too high.",
            [run.series("norm", lambda line: line.gradient_norm)],
        ),
        Plot(
            "Learning rate",
            "From the schedule.",
            [run.series("rate", lambda line: line.learning_rate)],
            format=lambda rate: f"{rate:.2g}",
        ),
        Plot(
            "GPU memory, GB",
            "In use by all programs on the GPU. Near the top, running out of memory is near too.",
            [
                _scaled(
                    run.series("memory", lambda line: line.gpu.memory_bytes if line.gpu else None),
                    1e-9,
                )
            ],
        ),
        Plot(
            "GPU power, W",
            "Read from NVML at progress lines. Far below the limit, the GPU has little to do.",
            [run.series("power", lambda line: line.gpu.power_watts if line.gpu else None)],
        ),
    ]


def _scaled(series: Series, factor: float) -> Series:
    return Series(series.name, series.xs, [factor * value for value in series.ys])


def _causes(lines: list[tuple[int, dict[str, float]]]) -> list[Series]:
    """The largest causes, and the sum of the others."""
    totals: dict[str, float] = {}
    for _, causes in lines:
        for cause, share in causes.items():
            totals[cause] = totals.get(cause, 0.0) + share
    named = sorted((cause for cause in totals if totals[cause]), key=lambda cause: -totals[cause])
    shown = named if len(named) <= _MOST_CAUSES + 1 else named[:_MOST_CAUSES]
    found = [_of_causes(cause, [cause], lines) for cause in shown]
    if len(shown) < len(named):
        found.append(_of_causes("the rest", named[_MOST_CAUSES:], lines))
    return found


def _of_causes(name: str, causes: list[str], lines: list[tuple[int, dict[str, float]]]) -> Series:
    shares = [sum(found.get(cause, 0.0) for cause in causes) for _, found in lines]
    return Series(name, [step for step, _ in lines], shares)


def _settings(run: RunData) -> str:
    if not run.config:
        return ""
    return (
        "<h2>Settings</h2><details><summary>config.yaml</summary>"
        f'<pre tabindex="0">{escape(run.config)}</pre></details>'
    )
