"""Finding input files, cutting them into units, reading their documents."""

import bz2
import errno
import gzip
import itertools
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import tokenfeed
from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.tools.corpus.blocks import LongLine, whole_lines
from tokenfeed.tools.corpus.records import FieldKind, Reject
from tokenfeed.tools.corpus.sources import Corpus, find_corpus
from tokenfeed.tools.corpus.units import Unit, auto_shard_bytes, cut_units, read_records

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


class Document(NamedTuple):
    """A usable record."""

    record: int
    utf8: bytes


def find(*paths: Path, out: Path | None = None, exclude: tuple[str, ...] = ()) -> Corpus:
    given = tuple(map(str, paths))
    return find_corpus(given, out=out or paths[0].parent / "out", field="text", exclude=exclude)


def names(corpus: Corpus, root: Path) -> list[str]:
    return [os.path.relpath(source.path, root) for source in corpus.sources]


def read(*paths: Path, shard_bytes: int = 10**9) -> list[Document | Reject]:
    units = cut_units(find(*paths).sources, shard_bytes)
    return [record for unit in units for record in read_unit(unit)]


def read_unit(unit: Unit) -> list[Document | Reject]:
    """Every record of a unit in its order, good or bad."""
    found: list[Document | Reject] = []
    for part in unit.parts:
        of_part: list[Document | Reject] = []
        for records in read_records(part, {"text": FieldKind.TEXT}):
            pairs = zip(records.numbers.tolist(), records.fields["text"], strict=True)
            of_part += [Document(*pair) for pair in pairs] + records.rejects
        found += sorted(of_part, key=lambda record: record.record)
    return found


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    for name in ("b.py", "a.txt", "sub/c.md", "sub/deep/d", ".hidden", ".git/x", "__pycache__/y"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "sub/image.png").write_bytes(b"\x89PNG\0\1")
    for name in ("packed.tar.gz", "a.parquet.gz"):  # Parquet is compressed by itself
        (root / name).write_bytes(gzip.compress(b"PAR1\0\0"))
    return root


def test_folders_are_read_in_name_order_without_hidden_and_binary_files(tree: Path) -> None:
    corpus = find(tree)
    assert names(corpus, tree) == ["a.txt", "b.py", "sub/c.md", "sub/deep/d"]
    assert [source.index for source in corpus.sources] == [0, 1, 2, 3]
    assert len(corpus.binary) == 3


def test_a_file_given_by_name_is_read_whatever_it_is(tree: Path) -> None:
    corpus = find(tree / ".hidden", tree / "sub/image.png")
    assert names(corpus, tree) == [".hidden", "sub/image.png"]


def test_excluded_names_and_paths_are_left_out(
    tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        find(tree, exclude=("*.py", "*.tmp"))
    assert "--exclude *.tmp: leaves out nothing" in caplog.text
    assert "*.py" not in caplog.text
    assert names(find(tree, exclude=("sub",)), tree) == ["a.txt", "b.py"]
    assert names(find(tree, exclude=("*.py", "sub/deep/*")), tree) == ["a.txt", "sub/c.md"]


def test_an_older_data_set_inside_the_corpus_is_no_input(tree: Path, tmp_path: Path) -> None:
    before = find(tree, out=tmp_path / "out").sources
    for number, names in enumerate([("manifest.json", "tokenizer.json"), (".parts",)]):
        folder = tree / f"older{number}"
        folder.mkdir()
        for name in (*names, "notes.txt"):
            (folder / name).write_text("{}")
    assert find(tree, out=tmp_path / "out").sources == before


def test_the_output_folder_inside_the_corpus_is_no_input(tree: Path) -> None:
    assert names(find(tree, out=tree / "sub"), tree) == ["a.txt", "b.py"]
    with pytest.raises(ConfigError, match="lies in the output folder"):
        find(tree / "sub/deep", out=tree / "sub")


def test_link_loops_end_and_a_file_reached_twice_is_read_once(tree: Path) -> None:
    (tree / "sub/loop").symlink_to(tree)
    (tree / "z.txt").symlink_to(tree / "a.txt")
    (tree / "nowhere").symlink_to(tree / "missing")
    assert names(find(tree, tree / "a.txt"), tree) == ["a.txt", "b.py", "sub/c.md", "sub/deep/d"]


def test_entries_that_are_no_regular_files_are_named(tmp_path: Path, tokenizer: Path) -> None:
    """They were left out, and nothing said so."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("words")
    os.mkfifo(corpus / "pipe.jsonl")
    (corpus / "null").symlink_to(os.devnull)
    (corpus / "nowhere.txt").symlink_to("missing")
    made = tokenfeed.pretokenize(corpus, tmp_path / "out", tokenizer=tokenizer, validation=0)
    assert [(each["file"], each["reason"].split(",")[0]) for each in made.rejects] == [
        (f"{corpus}/nowhere.txt", "is a broken link"),
        (f"{corpus}/null", "is a named pipe"),
        (f"{corpus}/pipe.jsonl", "is a named pipe"),
    ]
    links, others = made.summary.left_out
    assert links.startswith(f"1 broken link ({corpus}/nowhere.txt): ")
    assert others.startswith("2 named pipes, sockets and devices (")


def test_a_saved_data_set_may_not_list_a_broken_link(tmp_path: Path) -> None:
    """Its rows were left out, and nothing said so."""
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    file.unlink()
    file.symlink_to("missing")
    with pytest.raises(CorpusError, match="is listed in its folder, and is a broken link"):
        find(tmp_path / "saved")


def test_unreadable_entries_of_a_folder_raise(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "sub/itself").symlink_to("itself")  # stat fails, and not because it is missing
    with pytest.raises(CorpusError, match=r"sub/itself: cannot be read: Too many levels"):
        find(tree)
    assert names(find(tree, exclude=("itself",)), tree)[-1] == "sub/deep/d"
    stat = os.stat

    def fail(path: str, *args: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("b.py"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", fail)
    for paths in ((tree,), (tree / "b.py",)):
        with pytest.raises(CorpusError, match=r"b\.py: cannot be read: Input/output error"):
            find(*paths, out=tree.parent / "out", exclude=("itself",))


def test_a_vanished_or_changed_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    part = cut_units(find(path).sources, 100)[0].parts[0]
    path.write_text("three")
    with pytest.raises(CorpusError, match=r"a\.txt: changed"):
        list(read_records(part, {"text": FieldKind.TEXT}))
    path.unlink()
    with pytest.raises(CorpusError, match=r"a\.txt: vanished"):
        list(read_records(part, {"text": FieldKind.TEXT}))


@given(
    lengths=st.lists(st.integers(0, 60), max_size=40),
    shard_bytes=st.integers(1, 400),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    last_newline=st.booleans(),
)
def test_a_cut_json_lines_file_loses_and_doubles_no_record(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    shard_bytes: int,
    ending: bytes,
    last_newline: bool,
) -> None:
    # A length of 0 stands for a blank line.
    lines = [json.dumps({"text": "x" * n}).encode() if n else b"" for n in lengths]
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes(ending.join(lines) + (ending if last_newline else b""))
    expected = [Document(i, b"x" * n) for i, n in enumerate(lengths) if n]
    units = cut_units(find(path).sources, shard_bytes)
    assert [record for unit in units for record in read_unit(unit)] == expected
    longest = max((len(line) for line in lines), default=0) + len(ending)
    assert all(part.weight_bytes <= shard_bytes + longest for unit in units for part in unit.parts)


@given(
    data=st.binary(max_size=60).map(lambda data: data.replace(b"a", b"\n")),
    cuts=st.lists(st.integers(0, 60), max_size=5).map(sorted),
    most_bytes=st.integers(1, 61),
)
def test_lines_do_not_depend_on_how_blocks_fall(
    data: bytes, cuts: list[int], most_bytes: int
) -> None:
    edges = [0, *cuts, len(data)]
    blocks = [data[start:stop] for start, stop in itertools.pairwise(edges)]
    lines: list[bytes | int] = []
    for piece in whole_lines(blocks, most_bytes):
        if isinstance(piece, LongLine):
            lines.append(piece.num_bytes)
        else:
            assert piece
            lines += piece.removesuffix(b"\n").split(b"\n")
    expected = data.removesuffix(b"\n").split(b"\n") if data else []
    assert lines == [len(line) if len(line) > most_bytes else line for line in expected]


def test_auto_shard_size_is_a_64th_within_8_to_256_mb(tmp_path: Path) -> None:
    for name, num_bytes in {"small": 1000, "middle": 10**9, "large": 10**11}.items():
        with open(tmp_path / name, "wb") as file:
            file.truncate(num_bytes)
    sizes = [auto_shard_bytes(find(tmp_path / n).sources) for n in ("small", "middle", "large")]
    assert sizes == [8_000_000, 10**9 // 64, 256_000_000]
