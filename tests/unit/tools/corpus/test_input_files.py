"""Odd names, patterns, contents, containers and labels of input files."""

import bz2
import gzip
import json
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import zstandard
from support.corpora import read, read_bytes

from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.corpus.sources import Corpus, find_corpus, is_split_name
from tokenfeed.tools.corpus.units import cut_units
from tokenfeed.tools.encoding.labels import CountLabels, Labels, find_labels
from tokenfeed.tools.encoding.tasks.classify import ClassifyEncoder
from tokenfeed.tools.encoding.tasks.tag import TagEncoder
from tokenfeed.tools.pretokenizing.options import Options

LINES = b'{"text": "a"}\n{"text": "b"}\n'
RECORDS = {0: b"a", 1: b"b"}


def find(
    *paths: Path | str,
    out: Path,
    exclude: tuple[str, ...] = (),
    splits: tuple[tuple[str, str], ...] = (),
) -> Corpus:
    given = tuple(map(str, paths))
    return find_corpus(given, out=out, field="text", exclude=exclude, splits=splits)


# What a file holds


@pytest.mark.parametrize("name", ["a.jsonl.bak", "a", "part-00000", "a.jsonl-old", "a.log.gz"])
def test_records_under_an_unknown_ending_are_read_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level("INFO", "tokenfeed")
    data = gzip.compress(LINES) if name.endswith(".gz") else LINES
    assert read_bytes(tmp_path / name, data) == (RECORDS, {})
    assert f"{name}: read as .jsonl" in caplog.text


def test_records_in_a_txt_raise_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"a\.txt: the name says text.*to end in \.jsonl"):
        read_bytes(tmp_path / "a.txt", LINES)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes(LINES)
    assert read(tmp_path / "in") == ({0: LINES}, {})


@pytest.mark.parametrize("data", [b"plain words\n" * 9, b'{"body": "a"}\n', b"\x89PNG\0", b""])
def test_other_content_under_an_unknown_ending_is_a_text(tmp_path: Path, data: bytes) -> None:
    good, bad = read_bytes(tmp_path / "a.log", data)
    assert (good, len(bad)) == (({}, 1) if data[:1] == b"\x89" else ({0: data}, 0))


def test_an_archive_is_known_by_its_last_ending_and_its_content(tmp_path: Path) -> None:
    for name in ("how-to.tar.txt", "my.zip.md", "about.tar"):
        assert read_bytes(tmp_path / name, b"plain words") == ({0: b"plain words"}, {})
    (tmp_path / "words.txt").write_text("words")
    for mode in ("w", "w:gz"):
        path = tmp_path / ("a.tar" if mode == "w" else "a.tar.gz")
        with tarfile.open(path, mode) as archive:
            archive.add(tmp_path / "words.txt")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as zipped:
        zipped.write(tmp_path / "words.txt")
    for name in ("a.tar", "a.tar.gz", "a.zip"):
        with pytest.raises(CorpusError, match="is an archive"):
            read(tmp_path / name)


# Compressed files

TEXT = b"some words of a text\n" * 14_000


def test_a_zst_of_the_longest_window_is_read(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=31, write_checksum=True)
    packed = zstandard.ZstdCompressor(compression_params=parameters).compressobj().compress(b"")
    chunks = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = chunks.compress(TEXT) + chunks.flush()
    assert zstandard.get_frame_parameters(packed).window_size == 1 << 31
    assert read_bytes(tmp_path / "a.txt.zst", packed) == ({0: TEXT}, {})


@pytest.mark.parametrize("padding", [0, 512])
@pytest.mark.parametrize(
    ("ending", "pack"), [("xz", lzma.compress), ("gz", gzip.compress), ("bz2", bz2.compress)]
)
def test_streams_with_padding_between_and_behind_are_read_whole(
    tmp_path: Path, ending: str, pack: Callable[[bytes], bytes], padding: int
) -> None:
    zeros = b"\0" * padding
    data = pack(TEXT) + zeros + pack(b"") + pack(TEXT) + zeros
    assert read_bytes(tmp_path / f"a.txt.{ending}", data) == ({0: TEXT * 2}, {})


@pytest.mark.parametrize(("ending", "pack"), [("xz", lzma.compress), ("bz2", bz2.compress)])
def test_a_second_stream_that_is_damaged_at_its_start_is_no_end(
    tmp_path: Path, ending: str, pack: Callable[[bytes], bytes]
) -> None:
    data = pack(LINES) + b"XX" + pack(LINES)[2:]
    good, bad = read_bytes(tmp_path / f"a.jsonl.{ending}", data)
    assert (good, list(bad)) == ({}, [0])


# Patterns and splits


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("c/a.txt", "c/d/b.txt", "c/d/e.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


FORMS = ["d", "d/", "./d", "d/*", "./d/*", "d//*", "{here}/c/d", "{here}/c/d/*"]


@pytest.mark.parametrize("corpus", ["c", "./c", "c/", "{here}/c"])
@pytest.mark.parametrize("form", FORMS)
def test_a_pattern_may_be_a_name_or_a_path_below_the_folder(
    tree: Path, corpus: str, form: str
) -> None:
    corpus, form = corpus.format(here=tree), form.format(here=tree)
    found = find(corpus, out=tree / "out", exclude=(form,))
    assert [os.path.basename(source.path) for source in found.sources] == ["a.txt"]
    splits = (("test", form if form.endswith("*") else form.rstrip("/") + "/*"),)
    found = find(corpus, out=tree / "out", splits=splits)
    assert [source.split for source in found.sources] == [None, "test", "test"]


@pytest.mark.parametrize("here", [".", "c", "x"])
def test_patterns_do_not_depend_on_the_current_folder(
    tree: Path, monkeypatch: pytest.MonkeyPatch, here: str
) -> None:
    (tree / "x").mkdir()
    monkeypatch.chdir(tree / here)
    corpus = os.path.relpath(tree / "c")
    for given in (corpus, f"{corpus}/", tree / "c"):
        assert len(find(given, out=tree / "out", exclude=("c*",)).sources) == 3
        found = find(given, out=tree / "out", exclude=("./a.txt", "./b.txt"))
        assert [os.path.basename(source.path) for source in found.sources] == ["b.txt", "e.md"]
        found = find(given, out=tree / "out", splits=(("test", "d*"),))
        assert [source.split for source in found.sources] == [None, "test", "test"]
        with pytest.raises(ConfigError, match="no input file matches it"):
            find(given, out=tree / "out", splits=(("test", "c/d/*"),))


def test_every_pattern_of_a_split_must_match(tree: Path) -> None:
    splits = (("test", "*.md"), ("test", "*.rst"))
    with pytest.raises(ConfigError, match=r"test=\*\.rst`: no input file matches it"):
        find("c", out=tree / "out", splits=splits)
    splits = (("test", "*"), ("dev", "*.md"))
    with pytest.raises(ConfigError, match=r"dev=\*\.md`: patterns before it take all"):
        find("c", out=tree / "out", splits=splits)
    splits = (("test", "d/*"), ("test", "*.md"))
    assert len(find("c", out=tree / "out", splits=splits).sources) == 3


def save(folder: Path, *splits: str) -> None:
    data = datasets.Dataset.from_dict({"text": ["a", "b"]})
    datasets.DatasetDict(dict.fromkeys(splits, data)).save_to_disk(str(folder))


def test_a_split_may_have_a_dot_in_its_name(tmp_path: Path) -> None:
    save(tmp_path / "saved", "train.clean", "dev.v1.0")
    found = find(tmp_path / "saved", out=tmp_path / "out")
    assert [source.split for source in found.sources] == ["train.clean", "dev.v1.0"]
    paths = ("in", "out")
    for name in ("train.clean", "rejects.jsonlx", "manifest.json5"):
        Options(paths=paths, split=(f"{name}=*.txt",))
    for name in ("", ".", "..", ".hidden", "-x", "a/b"):
        assert not is_split_name(name)
        with pytest.raises(ConfigError, match="expected a name and a pattern"):
            Options(paths=paths, split=(f"{name}=*.txt",))


@pytest.mark.parametrize("pattern", ["train", "./train", "train/*", "{here}/saved/train", "*ain"])
def test_a_split_of_a_saved_data_set_can_be_left_out(tmp_path: Path, pattern: str) -> None:
    save(tmp_path / "saved", "train", "test")
    exclude = (pattern.format(here=tmp_path),)
    found = find(tmp_path / "saved", out=tmp_path / "out", exclude=exclude)
    assert [source.split for source in found.sources] == ["test"]
    with pytest.raises(CorpusError, match="no input file"):
        find(tmp_path / "saved", out=tmp_path / "out", exclude=("*.arrow",))


# Labels


def labels_of(path: Path, rows: list[Any]) -> Labels:
    path.mkdir()
    (path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    units = cut_units(find(path, out=path / "out").sources, 10**9)
    task = ClassifyEncoder()
    return find_labels(units, task, map(CountLabels(task).of_unit, units))


def labelled(*labels: Any) -> list[Any]:
    return [{"text": "a", "label": label} for label in labels]


def test_one_stray_label_does_not_rename_whole_numbers(tmp_path: Path) -> None:
    for number, stray in enumerate(["", "n/a", "-1", "1.0"]):
        found = labels_of(tmp_path / f"{number}", labelled(*"012" * 40, stray))
        assert found == Labels(("0", "1", "2"), are_numbers=True)
        task = ClassifyEncoder(labels=found)
        values: Any = {"text": [b"a", b"b"], "label": ["1", stray]}
        assert list(task.unusable(values)) == [1]


def test_an_empty_label_is_rejected_like_none(tmp_path: Path) -> None:
    data = b'{"text": ""}\n{"text": "x"}\n{"text": null}\n'
    (tmp_path / "a.jsonl").write_bytes(data)
    good, bad = read(tmp_path / "a.jsonl", FieldKind.LABEL)
    assert (good, list(bad)) == ({1: "x"}, [0, 2])
    assert "field `text` is empty, expected a name or a whole number" in bad[0]


def test_a_mix_of_numbers_and_names_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"like 'x': 1 of 4. Correct these, or turn the numbers"):
        labels_of(tmp_path / "mixed", labelled("0", "1", "2", "x"))
    found = labels_of(tmp_path / "names", labelled(*["joy", "anger"] * 60, "7"))
    assert found == Labels(("7", "anger", "joy"))
    found = labels_of(tmp_path / "codes", labelled("007", "10", "x"))
    assert found == Labels(("007", "10", "x"))


def test_a_label_that_only_rejected_records_have_is_no_class(tmp_path: Path) -> None:
    rows = [*labelled("joy", "anger"), {"text": None, "label": "lost"}, {"label": "gone"}]
    assert labels_of(tmp_path / "in", rows).names == ("anger", "joy")


def test_a_tag_without_a_number_rejects_its_record() -> None:
    task = TagEncoder(labels=Labels(("B", "O")))
    values: Any = {
        "tokens": [[b"a"], [b"a", b"b"], [b"a"]],
        "tags": [["B"], ["O", "X"], ["O", "O"]],
    }
    assert list(task.unusable(values)) == [1, 2]
    assert task.unusable(values)[1] == "field `tags` has 'X', expected a label of the others"
