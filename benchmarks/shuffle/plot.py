"""Draws benchmarks/results/shuffle.svg from shuffle.json: the share of one source, step by step.

usage: python -m benchmarks.shuffle.plot [RESULTS.json]
"""

import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.protocol import RESULTS
from benchmarks.shuffle.cases import LINES, PICTURED

__all__ = ["plot"]

OURS, PEER = "#1f6feb", "#8c959f"
WIDTH, HEIGHT, LEFT, GAP = 840, 84, 46, 40
HIGHEST = 0.4
TICKS = (0.0, 0.1, 0.2, 0.3, 0.4)


def plot(results: Path) -> Path:
    """Draw the picture beside the results, a panel an order."""
    entries = json.loads(results.read_text())["results"]
    lines = {
        entry["case"]: entry["line"]
        for entry in entries
        if entry["rows"] == PICTURED and "line" in entry
    }
    names = [name for name in LINES if name in lines]
    path = results.with_suffix(".svg")
    height = len(names) * (HEIGHT + GAP) + 24
    title = "Share of one of ten sources in every 1 M tokens of an epoch"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13" role="img">'
        f"<title>{title}</title>"
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    )
    panels = [
        panel(name, lines[name], n * (HEIGHT + GAP) + GAP - 8) for n, name in enumerate(names)
    ]
    foot = f'<text x="{LEFT}" y="{height - 8}" fill="#57606a">{title}</text></svg>'
    path.write_text("\n".join([head, *panels, foot]) + "\n")
    return path


def panel(name: str, line: list[float], top: int) -> str:
    """One order: a grid, its name, its line."""
    color = OURS if name.startswith("tokenfeed") else PEER
    parts = [f'<text x="{LEFT}" y="{top - 7}" font-weight="bold">{escape(name)}</text>']
    for tick in TICKS:
        y = top + HEIGHT * (1 - tick / HIGHEST)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 10}" stroke="#eaeef2"/>')
        if tick in (0.0, 0.2, 0.4):
            label = f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.0%}</text>'
            parts.append(label)
    across = (WIDTH - 10 - LEFT) / max(1, len(line) - 1)
    points = " ".join(
        f"{LEFT + n * across:.1f},{top + HEIGHT * (1 - min(share, HIGHEST) / HIGHEST):.1f}"
        for n, share in enumerate(line)
    )
    stroke = f'fill="none" stroke="{color}" stroke-width="1.5"'
    return "\n".join([*parts, f'<polyline points="{points}" {stroke}/>'])


if __name__ == "__main__":
    print(plot(Path(sys.argv[1]) if sys.argv[1:] else RESULTS / "shuffle.json"))
