"""A data set made in a store is the one made in a folder, wherever its making was broken off."""

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.commands import call
from support.corpora import texts
from support.data_sets import files_of
from support.false_engine import false_engine, sampled_document
from support.object_server import FAULTS, Fault, Remote
from support.pretokenizing import CarelessExecutor, make, on_cluster, part, with_fast_engine
from tokenizers import Tokenizer

from tokenfeed.pipeline.errors import ConfigError, CorpusError, ManifestError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.remote.object_store import XXH3_KEY, ObjectStore
from tokenfeed.tools import shards
from tokenfeed.tools.encoding.unit import UnitEncoder

pytest.importorskip("obstore")

CHANGES = ("write", "create")


class Killed(BaseException):
    """The process has come to its end."""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of three units."""
    folder = tmp_path_factory.mktemp("lines")
    text = "".join(json.dumps({"text": text}) + "\n" for text in texts(45, seed=3))
    (folder / "lines.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def undisturbed(
    lines: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert make(lines, out, tokenizer, validation=0.1).units >= 3
    return files_of(out)


def url_of(remote: Remote) -> str:
    return f"s3://{remote.prefix}"


def objects_of(remote: Remote) -> dict[str, bytes]:
    there = remote.server.objects.items()
    return {name.removeprefix(f"{remote.prefix}/"): each.data for name, each in there}


def killed_after(patch: pytest.MonkeyPatch, changes: int) -> list[str]:
    """Have a process end after so many changes of a store: from then on it makes none. What it
    makes is in the list."""
    made: list[str] = []

    def ending(do: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def done(store: ObjectStore, name: str, *arguments: Any) -> Any:
            if len(made) == changes:
                raise Killed
            made.append(f"{kind} {name}")
            return do(store, name, *arguments)

        return done

    for kind in CHANGES:
        patch.setattr(ObjectStore, kind, ending(getattr(ObjectStore, kind), kind))
    delete = ending(ObjectStore.delete, "delete")

    def delete_each(store: ObjectStore, *names: str) -> None:
        for name in names:
            delete(store, name)

    patch.setattr(ObjectStore, "delete", delete_each)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.long)])
def test_a_run_broken_off_at_any_change_of_the_store_is_continued_to_the_same_objects(
    step: int, lines: Path, tokenizer: Path, remote: Remote, undisturbed: dict[str, bytes]
) -> None:
    for changes in itertools.count(0, step):
        remote.server.objects.clear()
        with pytest.MonkeyPatch.context() as patch:
            made = killed_after(patch, changes)
            try:
                make(lines, url_of(remote), tokenizer, validation=0.1)
                break
            except Killed:
                pass
        make(lines, url_of(remote), tokenizer, validation=0.1)
        assert objects_of(remote) == undisturbed, made
    assert changes >= len(made) >= 20
    assert objects_of(remote) == undisturbed


@pytest.mark.slow
def test_a_store_behind_a_bad_network_gets_the_same_objects(
    lines: Path, tokenizer: Path, remote: Remote, undisturbed: dict[str, bytes]
) -> None:
    faults = [Fault(kind, seconds=0.01) for kind in FAULTS if kind != "stall"]
    remote.proxy.schedule.extend(itertools.chain.from_iterable((each, None) for each in faults * 2))
    make(lines, url_of(remote), tokenizer, validation=0.1)
    assert not remote.proxy.schedule
    assert objects_of(remote) == undisturbed


def test_a_shard_is_one_request_and_carries_its_checksum(
    lines: Path, tokenizer: Path, remote: Remote
) -> None:
    made = make(lines, url_of(remote), tokenizer)
    manifest = Manifest.read(remote.store)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    assert len(shards) >= made.units
    for shard in shards:
        name = f"{remote.prefix}/{shard.file}"
        assert remote.server.objects[name].metadata[XXH3_KEY] == shard.xxh3
        assert remote.proxy.seen.count(f"PUT /{name}") == 1
        assert f"GET /{name}" not in remote.proxy.seen


@pytest.mark.slow
def test_a_cluster_needs_no_shared_folder_and_a_wrong_engine_leaves_nothing(
    tmp_path: Path, byte_level: Tokenizer, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, corpus = tmp_path / "tokenizer.json", tmp_path / "corpus"
    byte_level.save(str(tokenizer))
    corpus.mkdir()
    for number, text in enumerate([*texts(40), sampled_document("LIE", 3_000)]):
        (corpus / f"{number:03}.txt").write_text(text)
    with_fast_engine(monkeypatch)
    monkeypatch.setitem(sys.modules, "gigatoken", false_engine())
    make(corpus, tmp_path / "plain", tokenizer)
    with_fast_engine(monkeypatch, crew=True)
    on_cluster(monkeypatch, CarelessExecutor(1))
    make(corpus, url_of(remote), tokenizer, runner="dask")
    assert objects_of(remote) == files_of(tmp_path / "plain")


def test_what_is_in_a_store_is_recognised_or_refused_as_in_a_folder(
    lines: Path, tokenizer: Path, remote: Remote
) -> None:
    url = url_of(remote)
    with pytest.raises(ConfigError, match=f"{url} holds nothing to finish"):
        make(lines, url, tokenizer, finish=True)
    remote.put("notes.txt", b"mine")
    with pytest.raises(ConfigError, match=f"{url}: already holds other data \\(notes.txt\\)"):
        make(lines, url, tokenizer)
    remote.server.objects.clear()
    part("0/3", lines, url, tokenizer)
    with pytest.raises(ConfigError, match=r"--validation: before not given, now 0\.5"):
        make(lines, url, tokenizer, validation=0.5)
    made = make(lines, url, tokenizer, finish=True)
    assert 0 < made.resumed_units < made.units
    made = objects_of(remote)
    assert make(lines, url, tokenizer).already_finished
    assert part("0/3", lines, url, tokenizer).already_finished
    with pytest.raises(ConfigError, match=r"already holds a finished .* --validation: before"):
        make(lines, url, tokenizer, validation=0.5)
    assert objects_of(remote) == made
    del remote.server.objects[f"{remote.prefix}/train/00001.arrow"]
    with pytest.raises(ManifestError, match=f"{url}/train/00001.arrow: is missing or of another"):
        make(lines, url, tokenizer)


def inspected(out: Path | str, *options: str) -> str:
    printed = call(shards.main, "inspect", out, *options).stdout
    return printed if options else re.sub(" +", " ", printed)


@pytest.mark.parametrize("is_remote", [False, True])
def test_inspect_says_how_far_an_unfinished_run_is(
    remote: Remote, tmp_path: Path, tokenizer: Path, is_remote: bool
) -> None:
    out = url_of(remote) if is_remote else tmp_path / "out"
    corpus = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": text}) for text in texts(60, seed=5)]
    lines[1] = '{"other": 1}'
    corpus.write_text("\n".join(lines) + "\n")
    part("0/3", corpus, out, tokenizer)
    result = json.loads(inspected(out, "--json"))
    planned = result["units_planned"]
    assert planned >= 3
    assert result["units_missing"] == [n for n in range(planned) if n % 3]
    assert (result["rejected"], result["failures"]) == (1, {})
    said = inspected(out)
    assert f"units {planned - len(result['units_missing'])} of {planned} done\n" in said
    assert f"1 so far; first {corpus}, record 1: no field `text`" in said
    assert "next repeat the command of each part that ended early" in said
    with (
        patch.object(UnitEncoder, "encode", side_effect=CorpusError("the disk is full")),
        pytest.raises(CorpusError),
    ):
        part("1/3", corpus, out, tokenizer, workers=1)
    assert "failures part 1/3: the disk is full\n" in inspected(out)
    part("1/3", corpus, out, tokenizer)
    assert "failures" not in inspected(out)
    part("2/3", corpus, out, tokenizer)
    assert "fingerprint" in inspected(out)
