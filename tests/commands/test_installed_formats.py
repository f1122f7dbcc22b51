"""An installed package adds formats by entry points."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import feather

MODULE = '''
def read_pages(file):
    """Paragraphs as texts and dicts in turn; "!" raises an error."""
    for number, text in enumerate(file.read().decode().split("\\n\\n")):
        if text == "!":
            raise RuntimeError("a page with nothing on it")
        yield {"text": text, "other": number} if number % 2 else text


def read_careless(file):
    """Lines in one dict, up to the end or an error, which is ignored."""
    row = {}
    try:
        for line in file:
            row["text"] = line.decode().strip()
            yield row
            if row["text"] == "stop":
                return
    except Exception:
        return
'''
POINTS = """
[tokenfeed.formats]
pages = pages_package:read_pages
broken = pages_package:missing
careless = pages_package:read_careless
twice = pages_package:read_pages
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
    other = tmp_path / "installed" / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[tokenfeed.formats]\ntwice = pages_package:x\n")
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
@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("broken", "broken = pages_package:missing: cannot be imported"),
        ("twice", "pages_package:read_pages and pages_package:x both read .twice"),
    ],
)
def test_packages_that_cannot_be_used_are_named(
    tmp_path: Path, environment: dict[str, str], ending: str, words: str
) -> None:
    (tmp_path / f"x.{ending}").write_text("text")
    made = pretokenize(environment, tmp_path, f"x.{ending}", "out")
    assert made.returncode == 2
    assert words in made.stderr
    assert made.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_careless_reader_neither_repeats_records_nor_hides_damage(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [f"line {number}" for number in range(3000)]
    (folder / "a.careless").write_text("\n".join(lines))
    packed = gzip.compress("\n".join(lines).encode())
    (folder / "cut.careless.gz").write_bytes(packed[: len(packed) // 2])
    stopped = gzip.compress(b"one\nstop\n" + bytes(10_000))
    (folder / "stopped.careless.gz").write_bytes(stopped[:-8] + bytes(8))  # a wrong checksum
    made = pretokenize(environment, tmp_path, "in", "out")
    assert made.returncode == 0, made.stderr
    rejects = lines_of(tmp_path / "out/rejects.jsonl")
    names = [Path(reject["file"]).name for reject in rejects]
    assert names == ["cut.careless.gz", "stopped.careless.gz"]
    sources = lines_of(tmp_path / "out/sources.jsonl")
    assert [source["written"] for source in sources] == [3000, 0, 0]
    tables = [feather.read_table(path, memory_map=False) for path in tmp_path.glob("out/*/*.arrow")]
    rows = {tuple(ids) for table in tables for ids in table["input_ids"].to_pylist()}
    assert len(rows) == 3000
