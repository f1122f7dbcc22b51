"""Draws benchmarks/results/scenarios.svg from scenarios.json: real tokens a second of both sides.

usage: python -m benchmarks.scenarios.plot [FILE.json]   needs matplotlib: pip install --group bench
"""

import json
import sys
from pathlib import Path

from benchmarks.protocol import RESULTS

__all__ = ["plot"]

COLORS = {"before": "#8c959f", "after": "#1f6feb"}
NAMES = {"before": "the loop as it was", "after": "train"}
HEIGHT = 0.38


def plot(results: Path) -> Path:
    """Draw the picture beside the results, the first situation at its top."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit(
            "error: no plot: matplotlib is missing. pip install --group bench, then "
            "python -m benchmarks.scenarios.plot"
        )
    entries = json.loads(results.read_text())["results"]
    said = [entry["said"] for entry in entries if entry["side"] == "before"]
    figure = Figure(figsize=(9, 0.75 * len(said) + 1), facecolor="white")
    FigureCanvasSVG(figure)
    axis = figure.subplots()
    for place, side in enumerate(COLORS):
        chosen = [entry for entry in entries if entry["side"] == side]
        heights = [number + (place - 0.5) * HEIGHT for number in range(len(said))]
        speeds = [entry["tokens_s"]["median"] / 1e3 for entry in chosen]
        drawn = axis.barh(heights, speeds, HEIGHT, color=COLORS[side], label=NAMES[side])
        axis.bar_label(drawn, [told(entry) for entry in chosen], padding=4, fontsize=11)
    axis.set_yticks(range(len(said)), said)
    axis.invert_yaxis()
    axis.margins(x=0.3)
    axis.tick_params(labelsize=11)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#eaeef2")
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_xlabel("thousand real tokens per second, one thread on a CPU", fontsize=12)
    axis.legend(frameon=False, fontsize=11)
    figure.tight_layout()
    path = results.with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None})
    return path


def told(entry: dict[str, dict[str, float]]) -> str:
    speed = f"{entry['tokens_s']['median'] / 1e3:.1f}"
    times = entry.get("times_tokens_s")
    return speed + (f"  ({times['median']:.1f} times)" if times else "")


if __name__ == "__main__":
    print(plot(Path(sys.argv[1]) if sys.argv[1:] else RESULTS / "scenarios.json"))
