"""Draw the picture of the README: a slow loop, its report by `tokenfeed stall`, and the loader.

python docs/demo_picture.py demo/picture.svg           # what `make demo` does
python docs/demo_picture.py docs/images/demo.svg       # also writes the lines of the README
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
SCRIPT = ROOT / "recipes" / "slow_script.py"
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "demo.svg"
_COLUMNS, _INDENT = 88, 9
_LINE, _LETTER, _MARGIN, _LEFT = 19, 7.83, 20, 500
_SCALE = 0.67
"""Of the plot, which is 720 wide."""


def loop_of(code: str) -> list[str]:
    """Return the lines of the last loop of a script."""
    lines = code.splitlines()
    return lines[max(n for n, line in enumerate(lines) if line.startswith("for ")) :]


def readme_example() -> list[str]:
    """Return the lines with the loader in the first Python block of the README."""
    readme = README.read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0].splitlines()
    begin = next(n for n, line in enumerate(block) if "ShardLoader(" in line)
    return block[begin : begin + 3]


def measure() -> tuple[list[str], list[Sample]]:
    """Run `tokenfeed stall` on the script; return the printed lines and the samples of the plot."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "tokenfeed", "stall", "--out", folder, str(SCRIPT)]
        ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
        report = json.loads((Path(folder) / "report.json").read_text())
    lines = [line for line in ended.stderr.splitlines() if not line.startswith(("page", "steps"))]
    return lines, msgspec.convert(report["stall"]["samples"], list[Sample])


def picture(report: list[str], samples: list[Sample]) -> str:
    """Return the SVG."""
    before, after = loop_of(SCRIPT.read_text(encoding="utf-8")), readme_example()
    left = ["# slow_script.py", *before, "", "$ tokenfeed stall slow_script.py"]
    right = [
        part
        for line in report
        for part in textwrap.wrap(line, _COLUMNS, subsequent_indent=" " * _INDENT)
    ]
    right += ["", "# instead of the slow data set:", *after]
    plot = sample_plots(samples)[0]
    width, height = _LEFT + 2 * _MARGIN + _LETTER * _COLUMNS, 2 * _MARGIN + _LINE * len(right)
    style = (ROOT / "trainer" / "stall" / "style.css").read_text(encoding="utf-8")
    style = style.partition("\n@media (max")[0]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}">
<title>A loop with a slow data set, what tokenfeed stall reports of it, and the loader</title>
<style>
{style}
text {{ font: 13px ui-monospace, monospace; fill: var(--ink); }} .tick {{ fill: var(--soft); }}
</style>
<rect width="100%" height="100%" fill="var(--paper)"/>
<rect x="{_LEFT}" width="{width - _LEFT:.0f}" height="100%" fill="var(--card)"/>
{_texts(left, _MARGIN)}
{_texts(right, _LEFT + _MARGIN)}
<g transform="translate(0,{_LINE * (len(left) + 2)}) scale({_SCALE})">{plot.drawing()}</g>
</svg>
"""


def _texts(lines: list[str], x: float) -> str:
    return "\n".join(
        f'<text x="{x}" y="{_MARGIN + _LINE * (number + 0.7):.1f}" xml:space="preserve">'
        f"{escape(line, quote=False)}</text>"
        for number, line in enumerate(lines)
    )


def quoted(report: list[str]) -> str:
    """Return the lines of a report that the README quotes: verdict, reason and what to change."""
    return "".join(f"{line}\n" for line in report if line.startswith(("verdict", "reason", "next")))


def main() -> None:
    """Draw the picture; with the one of the README, also write the lines that it quotes."""
    report, samples = measure()
    target = Path(sys.argv[1])
    target.write_text(picture(report, samples), encoding="utf-8")
    if target.resolve() == PICTURE:
        before, begin, rest = README.read_text(encoding="utf-8").partition("```text\n")
        after = rest[rest.index("```") :]
        README.write_text(before + begin + quoted(report) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
