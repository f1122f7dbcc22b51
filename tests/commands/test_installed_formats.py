"""An installed package adds formats by entry points."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODULE = '''
def read_pages(file):
    """Paragraphs as texts and dicts in turn; "!" raises an error."""
    for number, text in enumerate(file.read().decode().split("\\n\\n")):
        if text == "!":
            raise RuntimeError("a page with nothing on it")
        yield {"text": text, "other": number} if number % 2 else text
'''
POINTS = """
[tokenfeed.formats]
pages = pages_package:read_pages
broken = pages_package:missing
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables of a process in which the package is installed."""
    folder = tmp_path / "installed"
    about = folder / "pages-1.5.dist-info"
    about.mkdir(parents=True)
    (folder / "pages_package.py").write_text(MODULE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pages\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text(POINTS)
    return {**os.environ, "PYTHONPATH": str(folder)}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def pretokenize(
    environment: dict[str, str], cwd: Path, *words: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenfeed", "pretokenize", *words, "--vocab-size", "300"]
    return subprocess.run(
        [*command, "--json"], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_installed_formats_are_read_like_built_in_formats(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    long = "long " * 300
    (folder / "a.pages").write_text(f"one\n\ntwo\n\n\n\n{long}\n\nthree")
    (folder / "b.pages.gz").write_bytes(gzip.compress(b"four\n\nfive\n\n!\n\nsix"))
    made = pretokenize(environment, tmp_path, "in", "out", "--max-record", "1kB")
    assert made.returncode == 0, made.stderr
    rejects = lines_of(tmp_path / "out/rejects.jsonl")
    assert [(Path(r["file"]).name, r["record"]) for r in rejects] == [
        ("a.pages", 3),
        ("b.pages.gz", 2),
    ]
    assert "a page with nothing on it" in rejects[1]["reason"]
    sources = lines_of(tmp_path / "out/sources.jsonl")
    assert [(s["written"], s["empty"], s["rejected"]) for s in sources] == [(3, 1, 1), (2, 0, 1)]


@pytest.mark.slow
def test_a_package_that_cannot_be_imported_is_named(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "x.broken").write_text("text")
    made = pretokenize(environment, tmp_path, "x.broken", "out")
    assert made.returncode == 2
    assert "broken = pages_package:missing: cannot be imported" in made.stderr
    assert made.stderr.count("\n") == 1
