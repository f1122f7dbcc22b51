"""Draw docs/images/stall.svg: report and plot of the script in docs/stall.md, from a real run.

python docs/stall_picture.py
"""

import json
import re
import subprocess
import sys
import tempfile
import textwrap
from html import escape
from pathlib import Path

import msgspec

from tokenfeed.trainer.stall.stall_page import sample_plots
from tokenfeed.trainer.stall.stall_report import Sample

ROOT = Path(__file__).parents[1]
_COLUMNS, _INDENT = 96, 9
_LINE, _LETTER, _MARGIN = 19, 7.83, 20
_PLOT_HEIGHT = 280


def run_script() -> tuple[str, list[Sample]]:
    """Run the script of the page, and return the printed report and the samples of the plot."""
    page = (ROOT / "docs" / "stall.md").read_text(encoding="utf-8")
    found = re.search(r'```python title="train.py"\n(.*?)```', page, re.DOTALL)
    assert found is not None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(found[1])
        words = ["-m", "tokenfeed", "stall", "--out", "out", "train.py"]
        ended = subprocess.run(
            [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=True
        )
        report = json.loads((Path(folder) / "out" / "report.json").read_text())
    return ended.stderr, msgspec.convert(report["stall"]["samples"], list[Sample])


def picture(report: str, samples: list[Sample]) -> str:
    """Return the picture: the lines of a report, and the plot of the stall by cause below."""
    lines = [
        part
        for line in ["$ tokenfeed stall train.py", *report.splitlines()]
        for part in textwrap.wrap(line, _COLUMNS, subsequent_indent=" " * _INDENT)
        if not line.startswith("page")
    ]
    top = 2 * _MARGIN + _LINE * len(lines)
    width = 2 * _MARGIN + _LETTER * _COLUMNS
    texts = "\n".join(
        f'<text x="{_MARGIN}" y="{_MARGIN + _LINE * (number + 0.7):.1f}" xml:space="preserve">'
        f"{escape(line)}</text>"
        for number, line in enumerate(lines)
    )
    plot = sample_plots(samples)[0]
    legend = "".join(
        f'<g transform="translate({_MARGIN + 110 * place},{top})"><text x="20" y="11">{name}</text>'
        f'<rect class="area c{number}" width="14" height="12"/></g>'
        for place, (number, name) in enumerate(plot.legend)
    )
    style = (ROOT / "trainer" / "stall" / "style.css").read_text(encoding="utf-8")
    style = "".join(line for line in style.splitlines(keepends=True) if "@media (max" not in line)
    height = top + 30 + _PLOT_HEIGHT
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}">
<title>The report of a training script, and its stall by cause over the steps</title>
<style>
{style}
text {{ font: 13px ui-monospace, monospace; fill: var(--ink); }} .tick {{ fill: var(--soft); }}
</style>
<rect width="100%" height="100%" fill="var(--card)"/>
{texts}
{legend}
<g transform="translate({_MARGIN},{top + 16})">{plot.drawing()}</g>
</svg>
"""


if __name__ == "__main__":
    (ROOT / "docs" / "images" / "stall.svg").write_text(picture(*run_script()))
