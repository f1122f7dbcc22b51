"""`shards merge`: the rows of all data sets, each with its own origin, in files that are shared."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.commands import call, run
from support.data_sets import corpus_rows, files_of, grown_by, sealed_manifest
from support.object_server import Remote

from tokenfeed.pipeline.errors import ConfigError, ManifestError, ShardFormatError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.format.store import LocalStore
from tokenfeed.tools import shards
from tokenfeed.tools.data_sets.copy import copy_data_set
from tokenfeed.tools.data_sets.merge import merge

Make = Callable[..., Path]


def maker(folder: Path, tokenizer: Path) -> Make:
    """Make a data set of named lists of texts: (name, {file: texts}, *options)."""

    def made(name: str, files: dict[str, list[str]], *options: object) -> Path:
        corpus = folder / f"{name}-in"
        corpus.mkdir()
        for file, texts in files.items():
            lines = [json.dumps({"text": text, "label": text[:1]}) for text in texts]
            (corpus / file).write_text("\n".join([*lines, "{"]))
        given = ("--tokenizer", tokenizer, "--validation", "0.3", *options)
        run(corpus, folder / name, *given)
        return folder / name

    return made


@pytest.fixture
def make(tmp_path: Path, tokenizer: Path) -> Make:
    return maker(tmp_path, tokenizer)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> tuple[Path, Path]:
    """Two data sets, only to be read."""
    make = maker(tmp_path_factory.mktemp("two"), tokenizer)
    texts = [f"text {number} of many words" for number in range(60)]
    one = make("one", {"a.jsonl": texts, "b.jsonl": ["", *texts[:9]]}, "--shard-size", "1KB")
    return one, make("other", {"c.jsonl": texts[3:40]}, "--shard-size", "1KB")


def verify(folder: Path) -> None:
    call(shards.main, "verify", folder)


def test_merge_has_all_rows_with_their_origins(two: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = json.loads(call(shards.main, "merge", *two, out, "--json").stdout)
    parts = [Manifest.read(folder) for folder in two]
    manifest = Manifest.read(out)
    assert corpus_rows(out) == corpus_rows(two[0]) + corpus_rows(two[1])
    assert said["rows"] == manifest.ledger.written == sum(part.ledger.written for part in parts)
    assert said["linked"] == said["shards"] == sum(len(s.shards) for s in manifest.splits.values())
    assert manifest.ledger.rejected == 3
    assert manifest.ledger.empty == 1
    assert (out / "rejects.jsonl").read_text().count("\n") == 3
    verify(out)


def test_merge_without_links_writes_the_same_files(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge([*map(str, two)], str(tmp_path / "linked"))

    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", refused)
    assert merge([*map(str, two)], str(tmp_path / "copied")).linked == 0
    assert files_of(tmp_path / "linked") == files_of(tmp_path / "copied")


def test_merge_places_splits_that_the_first_set_lacks(make: Make, tmp_path: Path) -> None:
    """Otherwise these shards would keep their names, and older readers would not reject them."""
    one = make("one", {"a.jsonl": ["x", "y"]}, "--validation", 0)
    other = make("other", {"b.jsonl": [f"text {n}" for n in range(40)]})
    merge([str(one), str(other)], str(tmp_path / "out"))
    for shard in Manifest.read(tmp_path / "out").split("validation").shards:
        assert shard.first_source == 1
        assert shard.file != shard.named
    assert corpus_rows(tmp_path / "out") == corpus_rows(one) + corpus_rows(other)


def test_merged_set_reads_the_same_from_a_store(
    two: tuple[Path, Path], tmp_path: Path, remote: Remote
) -> None:
    copy_data_set(str(two[1]), remote.store.name)
    merge([str(two[0]), remote.store.name], str(tmp_path / "out"))
    assert corpus_rows(tmp_path / "out") == corpus_rows(two[0]) + corpus_rows(two[1])
    copy_data_set(str(tmp_path / "out"), f"{remote.store.name}/all")
    copy_data_set(f"{remote.store.name}/all", str(tmp_path / "back"))
    assert corpus_rows(tmp_path / "back") == corpus_rows(tmp_path / "out")
    verify(tmp_path / "back")
    said = call(shards.main, "cat", f"{remote.store.name}/all", "--rows", 999, "--json").stdout
    assert sum("c.jsonl" in line for line in said.splitlines()) == sum(
        Path(file).name == "c.jsonl" for file in _files_in_train(tmp_path / "out")
    )


def _files_in_train(folder: Path) -> list[str]:
    said = call(shards.main, "cat", folder, "--rows", 999, "--json").stdout
    return [json.loads(line)["file"] for line in said.splitlines()]


def without_new_keys(folder: Path) -> Manifest:
    """The manifest as a reader sees it that ignores the keys of a merge."""
    content = json.loads((folder / "manifest.json").read_text())
    for split in content["splits"].values():
        for shard in split["shards"]:
            shard.pop("named", None)
            shard.pop("first_source", None)
    return Manifest.decoded(sealed_manifest(content), "manifest.json")


def test_reader_without_first_source_rejects_merged_shards(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    merge([*map(str, two)], str(tmp_path / "out"))
    manifest, old = Manifest.read(tmp_path / "out"), without_new_keys(tmp_path / "out")
    moved = 0
    for name, split in manifest.splits.items():
        for new, shard in zip(split.shards, old.splits[name].shards, strict=True):
            if new.first_source:
                moved += 1
                with pytest.raises(ShardFormatError, match="schema"):
                    ShardReader.open(tmp_path / "out", old, shard)
    assert moved > 2


def test_manifest_rejects_first_source_without_name(two: tuple[Path, Path], tmp_path: Path) -> None:
    merge([*map(str, two)], str(tmp_path / "out"))
    manifest = Manifest.read(tmp_path / "out")
    split = manifest.split("train")
    last = dataclasses.replace(split.shards[-1], named=split.shards[-1].file)
    forged = dataclasses.replace(
        manifest,
        splits=manifest.splits
        | {"train": dataclasses.replace(split, shards=(*split.shards[:-1], last))},
    )
    with pytest.raises(ManifestError, match="first_source` 2 without another name"):
        Manifest.decoded(forged.encoded(), "manifest.json")


LABELLED = ("--task", "classify")


@pytest.mark.parametrize(
    ("options", "differing", "error"),
    [
        ((), ("--tokenizer", "other"), "a merge needs one tokenizer"),
        ((), ("--end-token", "the"), "a merge needs one end id"),
        ((), ("--special-tokens-in-text", "split"), "one way to encode special tokens in text"),
        ((), LABELLED, "a merge needs one task"),
        (LABELLED, LABELLED, "a merge needs one label names"),
    ],
)
def test_merge_rejects_other_settings(
    make: Make, tmp_path: Path, options: Any, differing: Any, error: str
) -> None:
    if "other" in differing:
        (tmp_path / "z.txt").write_text("text of another")
        run(tmp_path / "z.txt", tmp_path / "t", "--vocab-size", 270)
        differing = ("--tokenizer", tmp_path / "t")
    texts = [f"{letter} the text" for letter in "abcabcab"]
    one = make("one", {"a.jsonl": texts}, *options)
    other = make("other", {"b.jsonl": [text.upper() for text in texts]}, *differing)
    said = call(shards.main, "merge", one, other, tmp_path / "out", expect=2).stderr
    assert said.startswith("error: ")
    assert error in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_merge_rejects_wrong_places(two: tuple[Path, Path], tmp_path: Path) -> None:
    one, other = map(str, two)
    for paths, to, error in (
        ([one, one], "out", "are the same data set"),
        ([one, other], one, r"already holds other data \(\.made_by\.json\)"),
        ([one, other], f"{one}-in", r"already holds other data \(a\.jsonl\)"),
        ([one, str(tmp_path / "none")], "out", "holds no finished data set"),
        ([one, f"{other}/manifest.json"], "out", r"manifest\.json: is not a folder"),
    ):
        with pytest.raises((ConfigError, ManifestError), match=error):
            merge(paths, str(tmp_path / to))
    with pytest.raises(ConfigError, match="not a folder of this machine"):
        merge([one, other], "s3://bucket/out")
    assert "expected FROM... OUT" in call(shards.main, "merge", one, other, expect=2).stderr


def test_grow_adds_rows_and_keeps_each_version(
    two: tuple[Path, Path], make: Make, tmp_path: Path, remote: Remote
) -> None:
    one, other = shutil.copytree(two[0], tmp_path / "one"), two[1]
    third = make("third", {"d.jsonl": ["more text"] * 5}, "--validation", 0)
    earlier, rows, files = [Manifest.read(one)], [corpus_rows(one)], [files_of(one)]
    for part in (other, third):
        rows.append(rows[-1] + corpus_rows(part))
        earlier.append(grown_by(one, part))
        files.append(files_of(one))
        assert corpus_rows(one) == rows[-1]
        verify(one)
    for before, after in pairwise(files):
        assert {
            n: data for n, data in before.items() if n != "manifest.json"
        }.items() <= after.items()
    copy_data_set(str(one), remote.store.name)
    copy_data_set(remote.store.name, str(tmp_path / "back"))
    verify(tmp_path / "back")
    manifest = Manifest.read(tmp_path / "back")
    assert [info.fingerprint for info in manifest.versions or ()] == [
        version.fingerprint for version in earlier[:-1]
    ]
    for version, expected in zip(earlier, rows, strict=True):
        past = manifest.at(LocalStore(tmp_path / "back"), version.fingerprint)
        assert past == version
        (tmp_path / "back/manifest.json").write_bytes(past.encoded())
        assert corpus_rows(tmp_path / "back") == expected
        verify(tmp_path / "back")
    said = call(shards.main, "inspect", one).stdout
    assert f"{earlier[0].fingerprint}, {earlier[1].fingerprint}" in said


def test_verify_names_a_damaged_version(two: tuple[Path, Path], tmp_path: Path) -> None:
    one = shutil.copytree(two[0], tmp_path / "one")
    before = Manifest.read(one)
    grown_by(one, two[1])
    kept = one / f"versions/{before.fingerprint}.json"
    kept.write_bytes(kept.read_bytes()[:-2])
    said = call(shards.main, "verify", one, expect=1).stdout
    assert f"{before.fingerprint}.json: expected" in said
    with pytest.raises(ManifestError, match="has checksum "):
        Manifest.read(one).at(LocalStore(one), before.fingerprint)
