"""The page: what a run was worth, what the device waited for, how it went, what to change."""

import re
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.trainer.config import PAGE_FILE
from tokenfeed.trainer.page.bars import draw_bars
from tokenfeed.trainer.page.causes import cause_table
from tokenfeed.trainer.page.plot import Plot, Series, draw
from tokenfeed.trainer.page.ranks import rank_table
from tokenfeed.trainer.page.run_data import RunData
from tokenfeed.trainer.page.scale import short

__all__ = ["page_of", "write_page"]

_MOST_CAUSES = 6
"""Areas that can be told apart; smaller ones are summed."""


def write_page(folder: Path) -> Path:
    """Write report.html of a run, atomically, from what the run left.

    Raises:
        ConfigError: The folder holds no report.
    """
    path = folder / PAGE_FILE
    page = page_of(RunData.of_run(folder))
    atomic_write(path, page.encode(errors="backslashreplace"))  # a path may be no UTF-8
    return path


def page_of(run: RunData) -> str:
    """The page as text, without a request to anywhere."""
    style = resources.files("tokenfeed.trainer.page").joinpath("style.css").read_text()
    name = escape(str(run.report.get("run_dir", run.folder)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name} · tokenfeed</title><style>{style}</style></head><body><main>"
        f"<h1>{name}</h1><p class=soft>{_about(run.report)}</p>{_cards(run)}"
        f"<h2>What the device waited for</h2>{cause_table(run.report)}"
        f"{rank_table(run.report)}{_advice(run.report)}"
        f"<h2>How the run went</h2><div class=plots>{''.join(map(draw, _plots(run)))}"
        f"{draw_bars(run.lengths)}</div>{_settings(run)}</main></body></html>\n"
    )


def _about(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    end = "" if report["finished"] else " It was stopped before its end."
    return escape(
        f"{report['model']}, {report['parameters'] / 1e6:.1f} M parameters, task "
        f"{report.get('task', 'lm')}, {report['precision']} on {report['device']}; {versions}.{end}"
    )


def _cards(run: RunData) -> str:
    report, speed = run.report, run.report["real_tokens_per_s"]
    found = {
        "stall": _share(report["stall"]["fraction"]),
        "real tokens a second": "not measured" if speed is None else f"{speed:,.0f}",
        "padding": _share(report["padding"]),
        "loss": _figure(report["loss_last"]),
        "validation loss": _figure(report["validation_loss_last"]),
        "steps": f"{report['steps']:,}",
        "real tokens": short(report["tokens"]),
        "MFU": _share((report.get("efficiency") or {}).get("mfu")),
        **_metrics(report),
    }
    cards = "".join(
        f"<div><span class=soft>{escape(name)}</span><b>{value}</b></div>"
        for name, value in found.items()
        if value
    )
    return f"<div class=cards>{cards}</div>"


def _metrics(report: dict[str, Any]) -> dict[str, str]:
    """Those of the last split that was measured; the loss has its place already."""
    splits = report.get("metrics") or {}
    split = next(reversed(splits), "")
    return {
        f"{name.replace('_', ' ')}, {split}": f"{value:.4g}"
        for name, value in splits.get(split, {}).items()
        if name != "loss"
    }


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _advice(report: dict[str, Any]) -> str:
    pieces = report["stall"].get("advice")
    if pieces is None:
        return ""
    if not pieces:
        return "<p>Nothing to advise: feeding is not the problem.</p>"
    items = "".join(f"<li>{_code(piece['text'])}{_gain(piece['gain'])}</li>" for piece in pieces)
    return f"<h3>What to change</h3><ul class=advice>{items}</ul>"


def _code(text: str) -> str:
    """Text in which backticks mean code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def _gain(gain: float | None) -> str:
    return "" if gain is None else f" <b>Gains {gain:.1%}.</b>"


def _plots(run: RunData) -> list[Plot]:
    return [
        Plot(
            "Stall by cause",
            "Share of the time between two progress lines in which the device had nothing to do. "
            "A tall area is worth looking at: the table above says what to do about its cause.",
            _causes(run),
            stacked=True,
            format=lambda share: f"{share:.3g}" if share == 0 else f"{share:.1%}",
        ),
        Plot(
            "Real tokens a second",
            "Without padding, the stall included. It should be flat: a dip is an evaluation, a "
            "checkpoint, or somebody else on the machine.",
            [run.series("real_tokens_per_s", "tokens/s")],
        ),
        Plot(
            "Loss",
            "Mean per target since the line before, and of the validation split. Where the second "
            "rises while the first falls, the run learns its data by heart.",
            [run.series("loss", "training"), run.series("validation_loss", "validation")],
            from_zero=False,
        ),
        Plot(
            "Seconds a step",
            "Half of the steps since the line before took less than p50, and one was the longest. "
            "A longest far above p50 is a step that waited.",
            [run.series("step_seconds", part, part) for part in ("p50", "max")],
        ),
        Plot(
            "Gradient norm",
            "Before clipping. A jump is a batch unlike the others, or a rate that is too high.",
            [run.series("gradient_norm", "norm")],
        ),
        Plot(
            "Learning rate",
            "What the schedule gave.",
            [run.series("learning_rate", "rate")],
            format=lambda rate: f"{rate:.2g}",
        ),
        Plot(
            "GPU memory, GB",
            "In use by everybody on the GPU. Near its end, out of memory is near too.",
            [_scaled(run.series("gpu", "memory", "memory_bytes"), 1e-9)],
        ),
        Plot(
            "GPU power, W",
            "What NVML read at progress lines. Far below the limit, the GPU has little to do.",
            [run.series("gpu", "power", "power_watts")],
        ),
    ]


def _scaled(series: Series, factor: float) -> Series:
    return Series(series.name, series.xs, [factor * value for value in series.ys])


def _causes(run: RunData) -> list[Series]:
    """The largest causes, and the rest in one."""
    lines = [line for line in run.lines if line.get("stall_causes")]
    totals: dict[str, float] = {}
    for line in lines:
        for cause, share in line["stall_causes"].items():
            totals[cause] = totals.get(cause, 0.0) + share
    named = sorted((cause for cause in totals if totals[cause]), key=lambda cause: -totals[cause])
    steps = [line["step"] for line in lines]
    shown = named if len(named) <= _MOST_CAUSES + 1 else named[:_MOST_CAUSES]
    found = [_of_cause(cause, [cause], steps, lines) for cause in shown]
    if len(shown) < len(named):
        found.append(_of_cause("the rest", named[_MOST_CAUSES:], steps, lines))
    return found


def _of_cause(
    name: str, causes: list[str], steps: list[int], lines: list[dict[str, Any]]
) -> Series:
    shares = [sum(line["stall_causes"].get(cause, 0.0) for cause in causes) for line in lines]
    return Series(name, steps, shares)


def _settings(run: RunData) -> str:
    if not run.settings:
        return ""
    text = escape(yaml.safe_dump(run.settings, sort_keys=False))
    return (
        "<h2>Settings</h2><details><summary>config.yaml</summary>"
        f'<pre tabindex="0">{text}</pre></details>'
    )
