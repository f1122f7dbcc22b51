"""Draw docs/images/badge-*.svg, the badges of the README, from pyproject.toml.

python docs/badges.py
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
_LETTER, _ROOM, _COLOR = 6.6, 12, "#0f766e"


def badges() -> dict[str, str]:
    """Return the badges by file name. They load nothing, so they also work offline."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = {
        "ci": ("CI", "lint, types, tests"),
        "docs": ("docs", "40 promises"),
        "python": ("Python", project["requires-python"].removeprefix(">=") + "+"),
        "licence": ("licence", project["license"]),
        "version": ("version", project["version"]),
    }
    return {f"badge-{name}.svg": _badge(*words) for name, words in texts.items()}


def _badge(left: str, right: str) -> str:
    first, second = (_LETTER * len(text) + _ROOM for text in (left, right))
    width = first + second
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="20">
<title>{left}: {right}</title>
<rect width="{width:.0f}" height="20" rx="3" fill="#3f4650"/>
<path d="M{first:.0f} 0H{width - 3:.0f}a3 3 0 0 1 3 3V17a3 3 0 0 1-3 3H{first:.0f}z"
 fill="{_COLOR}"/>
<g fill="#ffffff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">
<text x="{first / 2:.0f}" y="14">{left}</text>
<text x="{first + second / 2:.0f}" y="14">{right}</text>
</g>
</svg>
"""


if __name__ == "__main__":
    for name, badge in badges().items():
        (IMAGES / name).write_text(badge, encoding="utf-8")
