"""Draws text_loaders.svg beside text_loaders.json: real tokens per second, by rows and loader.

usage: python -m benchmarks.text_loaders.plot [RESULTS.json]

Needs matplotlib: pip install --group bench.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.protocol import RESULTS

OURS, PEER, BOUND = "#1f6feb", "#8c959f", "#d8dee4"
TITLES = {
    "short": "short rows: source lines",
    "medium": "medium rows: 20 lines",
    "documents": "documents: whole files",
    "chat": "conversations, with labels",
}


def plot(results: Path) -> Path:
    """Draw the picture beside the results; the fastest loader of each panel is at its top."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError:
        sys.exit(
            "error: no plot: matplotlib is missing. pip install --group bench, then "
            "python -m benchmarks.text_loaders.plot"
        )
    entries = [each for each in json.loads(results.read_text())["results"] if "mtok_s" in each]
    kinds = [kind for kind in TITLES if any(each["rows"] == kind for each in entries)]
    panels = {kind: sorted_bars(entries, kind) for kind in kinds}
    heights = [len(bars) for bars in panels.values()]
    figure = Figure(figsize=(9, 0.32 * sum(heights) + 0.75 * len(kinds)), facecolor="white")
    FigureCanvasSVG(figure)
    axes = figure.subplots(
        len(kinds), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axis, (kind, bars) in zip(axes, panels.items(), strict=True):
        names, speeds = zip(*bars, strict=True)
        drawn = axis.barh(names, speeds, color=[color(name) for name in names], height=0.72)
        axis.bar_label(drawn, [three_digits(speed) for speed in speeds], padding=4, fontsize=11)
        axis.set_title(TITLES[kind], loc="left", fontsize=13, fontweight="bold")
        axis.set_xscale("log")
        axis.tick_params(axis="y", labelsize=11, length=0)
        axis.tick_params(axis="x", labelsize=11)
        axis.grid(axis="x", color="#eaeef2")
        axis.set_axisbelow(True)
        axis.spines[["top", "right", "left"]].set_visible(False)
    slowest, fastest = axes[0].get_xlim()
    axes[0].set_xlim(slowest * 0.8, fastest * 2)
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes[-1].set_xlabel("M real tokens per second (logarithmic)", fontsize=12)
    figure.tight_layout()
    path = results.with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None})
    return path


def sorted_bars(entries: list[dict[str, Any]], kind: str) -> list[tuple[str, float]]:
    """Loaders and their medians, the slowest first: bars are drawn from below."""
    bars = [(each["case"], each["mtok_s"]["median"]) for each in entries if each["rows"] == kind]
    return sorted(bars, key=lambda bar: bar[1])


def three_digits(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def color(loader: str) -> str:
    if loader.startswith("tokenfeed"):
        return OURS
    return BOUND if loader.startswith("bound") else PEER


if __name__ == "__main__":
    print(plot(Path(sys.argv[1]) if sys.argv[1:] else RESULTS / "text_loaders.json"))
