"""What a new format says of itself is believed: its parser, its errors, its endings."""

import gzip
import io
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from support.corpora import read

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.registry import FORMATS
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.records import Fields, Records, records_of
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.jobs.run_records import versions


def read_members(part: FilePart, fields: Fields) -> Iterator[Records]:
    """Each member is a record; a damaged archive raises what is neither OSError nor ValueError."""
    with zipfile.ZipFile(io.BytesIO(Path(str(part.source.path)).read_bytes())) as archive:
        for number, name in enumerate(archive.namelist()):
            yield records_of([(number, {"text": archive.read(name).decode()})], fields)


@pytest.fixture(autouse=True)
def _zipped(monkeypatch: pytest.MonkeyPatch) -> None:
    zipped = Format(
        name="zipped",
        endings=(".zip",),
        read=read_members,
        damage=(zipfile.BadZipFile,),
        packages=("pytest",),
    )
    monkeypatch.setitem(FORMATS, zipped.name, zipped)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    with zipfile.ZipFile(folder / "a.zip", "w") as file:
        for number in range(3):
            file.writestr(str(number), f"text {number}" * 100)
    return folder / "a.zip"


def test_its_files_are_not_read_compressed_once_more_unless_it_says_so(archive: Path) -> None:
    compressed = archive.with_name("a.zip.gz")
    compressed.write_bytes(gzip.compress(archive.read_bytes()))
    with pytest.raises(CorpusError, match="is an archive of files"):
        read(compressed)


def test_a_file_given_by_name_is_known_by_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fasta = Format(
        name="fasta",
        endings=(".fasta",),
        read=read_members,
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


def test_the_version_of_its_parser_is_compared_between_machines() -> None:
    assert f"pytest {version('pytest')}" in versions()
