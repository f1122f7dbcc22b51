"""An installed package adds formats by entry points."""

import gzip
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from support.corpora import read

from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.tools.corpus.formats import registry
from tokenfeed.tools.corpus.formats.registry import FORMATS
from tokenfeed.tools.corpus.input_files import Format
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.jobs.run_records import versions

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
.Careless = pages_package:read_careless
twice = pages_package:read_pages
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the package, and another package that reads one of its formats."""
    folder = tmp_path / "installed"
    points = {"pages": POINTS, "other": "[tokenfeed.formats]\ntwice = pages_package:x\n"}
    for name, content in points.items():
        about = folder / f"{name}-1.5.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (about / "entry_points.txt").write_text(content)
    (folder / "pages_package.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(registry, "_points", lambda: entry_points(group=registry.GROUP))
    yield
    sys.modules.pop("pages_package", None)
    for ending in (".pages", ".careless"):
        FORMATS.pop(ending, None)


def test_installed_formats_are_read_like_built_in_formats(tmp_path: Path) -> None:
    (tmp_path / "a.pages").write_text(f"one\n\ntwo\n\n\n\n{'long ' * 300}\n\nthree")
    (tmp_path / "b.pages.gz").write_bytes(gzip.compress(b"four\n\nfive\n\n!\n\nsix"))
    good, bad = read(tmp_path / "a.pages", max_record_bytes=1000)
    assert (good, [*bad]) == ({0: b"one", 1: b"two", 2: b"", 4: b"three"}, [3])
    good, bad = read(tmp_path / "b.pages.gz")
    assert (good, [*bad]) == ({0: b"four", 1: b"five"}, [2])
    assert "a page with nothing on it" in bad[2]
    assert "pages 1.5" in versions()  # which machines that share a run compare


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("broken", "broken = pages_package:missing: cannot be imported"),
        ("twice", "pages_package:read_pages and pages_package:x both read .twice"),
    ],
)
def test_packages_that_cannot_be_used_are_named(tmp_path: Path, ending: str, words: str) -> None:
    (tmp_path / f"x.{ending}").write_text("text")
    with pytest.raises(ConfigError, match=words):
        read(tmp_path / f"x.{ending}")


def test_a_careless_reader_neither_repeats_records_nor_hides_damage(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(3000)]
    (tmp_path / "a.careless").write_text("\n".join(lines))
    good, bad = read(tmp_path / "a.careless")
    assert ([*good.values()], bad) == ([line.encode() for line in lines], {})
    packed = gzip.compress("\n".join(lines).encode())
    (tmp_path / "cut.careless.gz").write_bytes(packed[: len(packed) // 2])
    stopped = gzip.compress(b"one\nstop\n" + bytes(10_000))
    (tmp_path / "stopped.careless.gz").write_bytes(stopped[:-8] + bytes(8))  # a wrong checksum
    for name in ("cut", "stopped"):
        good, bad = read(tmp_path / f"{name}.careless.gz")
        assert (good, len(bad)) == ({}, 1)


def test_a_file_given_by_name_is_known_by_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fasta = Format(
        name="fasta",
        endings=(".fasta",),
        read=FORMATS["text"].read,
        begins=lambda start, field: start.startswith(b">") and field == "text",
    )
    monkeypatch.setitem(FORMATS, fasta.name, fasta)
    for name in ("a.sequences", "a.txt", "in/a.sequences"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(">0\nACGT")

    def format_of(path: Path, field: str = "text") -> str:
        return find_corpus((str(path),), out=None, field=field).sources[0].format

    assert format_of(tmp_path / "a.sequences") == "fasta"
    assert format_of(tmp_path / "a.sequences", "body") == "text"
    assert format_of(tmp_path / "in") == "text"
    with pytest.raises(CorpusError, match=r"Rename it to end in \.fasta"):
        format_of(tmp_path / "a.txt")
