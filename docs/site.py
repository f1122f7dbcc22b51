"""Hooks of mkdocs: pages that stand outside docs/, and links to them.

The README is the front page. The README, the changelog and what pages link to (results of
benchmarks, examples) stay where they are in the repository; the site has them at the same paths.
The map of the code and the list of decisions are generated.
"""

import os
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from map import ROOT, code_map

FRONT = "README.md"
PAGES = (
    FRONT,
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/text_loaders/README.md",
    "recipes/README.md",
)
SHOWN_AS_THEY_ARE = (
    "benchmarks/resume.py",
    "benchmarks/results/*",
    "examples/*.ipynb",
    "recipes/*.py",
    "recipes/*.sh",
    "LICENSE",
    "pipeline/*/*.py",
    "trainer/*.py",
    "trainer/*/*.py",
    "tests/unit/integrations/test_torchtitan.py",
)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)#\s]+")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand outside docs/ or are generated."""
    files.append(File.generated(config, "files.md", content=code_map()))
    files.append(File.generated(config, "decisions/index.md", content=_decisions()))
    for name in PAGES:
        content = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, _in_site(name), content=content))
    for pattern in SHOWN_AS_THEY_ARE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where the site has things."""
    here = page.file.src_uri
    folder = os.path.dirname(here if here in PAGES else f"docs/{here}")
    if here == "index.md":
        folder = ""

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[0]))
        return posixpath.relpath(_in_site(target), os.path.dirname(here) or ".")

    return LINK.sub(moved, markdown)


def _decisions() -> str:
    """Return a page that lists the decisions by their titles."""
    lines = [
        "# Decisions",
        "",
        "Why things are as they are: the problem, the choice, and what was rejected.",
        "",
    ]
    for path in sorted((ROOT / "docs/decisions").glob("0*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        number, _, words = title.partition(". ")
        lines.append(f"- {number}: [{words}]({path.name})")
    return "\n".join(lines) + "\n"


def _in_site(name: str) -> str:
    """Where the site has a file of the repository."""
    return "index.md" if name == FRONT else name.removeprefix("docs/")
