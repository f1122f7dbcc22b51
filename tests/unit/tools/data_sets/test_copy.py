"""`shards copy`: every byte is there or the copy says so, and the same command continues it."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import call
from support.data_sets import files_of
from support.object_server import FAST, Fault, Remote, as_own_process, remote_store
from support.stores import keep_in_memory

from tokenfeed.pipeline.errors import ConfigError, ShardFormatError
from tokenfeed.pipeline.format.manifest import FileInfo, Manifest
from tokenfeed.pipeline.format.store import Store
from tokenfeed.pipeline.remote import object_store
from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.tools.data_sets import copy as copying
from tokenfeed.tools.data_sets.copy import copy_data_set, fetch
from tokenfeed.tools.shards import main

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    with pytest.MonkeyPatch.context() as monkeypatch, remote_store(monkeypatch) as remote:
        as_own_process(monkeypatch)
        from_url = ObjectStore.from_url
        hasty = lambda url: replace(from_url(url), timing=FAST)  # noqa: E731
        monkeypatch.setattr(object_store.ObjectStore, "from_url", hasty)
        yield remote


@pytest.fixture(autouse=True)
def empty(remote: Remote) -> None:
    remote.server.objects.clear()
    remote.proxy.schedule.clear()
    remote.proxy.seen.clear()
    remote.proxy.always, remote.proxy.match = None, ""


def objects_of(remote: Remote) -> dict[str, bytes]:
    prefix = f"{remote.prefix}/"
    return {name.removeprefix(prefix): each.data for name, each in remote.server.objects.items()}


def test_a_copy_goes_there_and_back(documents: Path, remote: Remote, tmp_path: Path) -> None:
    there = copy_data_set(str(documents), remote.store.name)
    assert objects_of(remote) == files_of(documents)
    assert there.copied == there.files == len(files_of(documents)) - 2
    back = copy_data_set(remote.store.name, str(tmp_path / "back"))
    assert files_of(tmp_path / "back") == files_of(documents)
    assert (back.copied_bytes, back.fingerprint) == (there.bytes, there.fingerprint)
    elsewhere = copy_data_set(remote.store.name, f"{remote.store.name}2")
    assert elsewhere.copied == there.files


def test_a_copy_is_completed_with_what_it_lacks(
    documents: Path, remote: Remote, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(documents, out)
    (out / "manifest.json").unlink()
    (out / "train/00000.arrow").write_bytes(b"x")
    assert copy_data_set(str(documents), str(out)).copied == 1
    assert files_of(out) == files_of(documents)
    assert copy_data_set(str(documents), str(out)).copied == 0
    copy_data_set(str(out), remote.store.name)
    del remote.server.objects[f"{remote.prefix}/train/00000.arrow"]
    remote.put("train/00001.arrow", remote.content("train/00001.arrow"))  # no checksum is told
    remote.proxy.seen.clear()
    assert copy_data_set(str(out), remote.store.name).copied == 2
    assert sum(line.startswith("PUT") for line in remote.proxy.seen) == 4
    assert objects_of(remote) == files_of(documents)


def test_the_manifest_is_there_only_when_all_is(documents: Path, remote: Remote) -> None:
    remote.proxy.match, remote.proxy.always = "/train/00001.arrow", Fault("403")
    with pytest.raises(Exception, match=r"train/00001\.arrow: the store refuses access"):
        copy_data_set(str(documents), remote.store.name)
    remote.proxy.always = None
    assert "manifest.json" not in objects_of(remote)
    copy_data_set(str(documents), remote.store.name)
    assert objects_of(remote) == files_of(documents)


def test_a_bit_that_flips_on_the_way_is_fetched_again(
    documents: Path, remote: Remote, tmp_path: Path
) -> None:
    copy_data_set(str(documents), remote.store.name)
    remote.proxy.match = "train/00000.arrow"
    remote.proxy.schedule.append(Fault("flip", 100))
    copy_data_set(remote.store.name, str(tmp_path / "out"))
    assert files_of(tmp_path / "out") == files_of(documents)


def test_a_damaged_object_is_named_and_not_copied(
    documents: Path, remote: Remote, tmp_path: Path
) -> None:
    copy_data_set(str(documents), remote.store.name)
    good = remote.content("train/00000.arrow")
    remote.put("train/00000.arrow", good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    with pytest.raises(ShardFormatError, match=r"^s3://.*/train/00000\.arrow: the file has checks"):
        copy_data_set(remote.store.name, str(tmp_path / "out"))
    assert not (tmp_path / "out/manifest.json").exists()
    assert not list((tmp_path / "out").rglob("*.tmp"))
    remote.put("train/00000.arrow", good[:100])
    with pytest.raises(ShardFormatError, match=r"00000\.arrow: .*Copy it again"):
        copy_data_set(remote.store.name, str(tmp_path / "out"))
    del remote.server.objects[f"{remote.prefix}/train/00000.arrow"]
    with pytest.raises(ShardFormatError, match=r"00000\.arrow: not found, but the manifest"):
        copy_data_set(remote.store.name, str(tmp_path / "out"))


def test_another_data_set_is_not_written_over(
    documents: Path, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    shutil.copytree(documents, other)
    manifest = Manifest.read(documents)
    replace(manifest, label_names=("another",)).write(other)
    with pytest.raises(ConfigError, match="holds another data set"):
        copy_data_set(str(documents), str(other))
    with pytest.raises(ConfigError, match="FROM and TO are the same place"):
        copy_data_set(str(documents), str(documents))
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/.made_by.json").write_text('{"CORPUS": ["x"]}')
    with pytest.raises(ConfigError, match="holds an unfinished run"):
        copy_data_set(str(documents), str(tmp_path / "begun"))
    shutil.copy(documents / ".made_by.json", tmp_path / "begun")
    (tmp_path / "begun/.parts").mkdir()
    (tmp_path / "begun/.parts/plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds an unfinished run"):
        copy_data_set(str(documents), str(tmp_path / "begun"))
    keep_in_memory(monkeypatch, documents)
    with pytest.raises(ConfigError, match=r"^memory://x: nothing can be written there"):
        copy_data_set(str(documents), "memory://x")
    copy_data_set("memory://x", str(tmp_path / "out"))
    assert files_of(tmp_path / "out") == files_of(documents)


def test_a_manifest_that_is_replaced_while_a_copy_is_made_is_not_copied(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, to = tmp_path / "source", tmp_path / "to"
    shutil.copytree(documents, source)
    manifest = Manifest.read(documents)

    def replaced(*arguments: Any, **options: Any) -> None:
        fetch(*arguments, **options)
        if arguments[0] == manifest.tokenizer:
            replace(manifest, label_names=("another",)).write(source)

    monkeypatch.setattr(copying, "fetch", replaced)
    assert copy_data_set(str(source), str(to)).fingerprint == manifest.fingerprint
    assert files_of(to) == files_of(documents)


def test_copy_into_place_of_another_copy_is_refused(
    documents: Path, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    shutil.copytree(documents, other)
    replace(Manifest.read(documents), label_names=("another",)).write(other)
    refused: list[str] = []

    def interfere(file: FileInfo, source: Store, path: Path, *rest: Any, **options: Any) -> None:
        """Begin a copy of another data set in the middle of the first one."""
        if pending:
            with pytest.raises(ConfigError) as caught:
                copy_data_set(str(other), pending.pop())
            refused.append(str(caught.value))
        fetch(file, source, path, *rest, **options)

    pending: list[str] = []
    monkeypatch.setattr(copying, "AT_ONCE", 1)
    monkeypatch.setattr(copying, "fetch", interfere)
    for to in (str(tmp_path / "to"), remote.store.name):
        pending.append(to)
        copy_data_set(str(documents), to)
        assert call(main, "verify", to).stdout.startswith(f"{to}: good")
    assert "another run is writing here" in refused[0]
    assert "holds an unfinished run" in refused[1]
    assert files_of(tmp_path / "to") == objects_of(remote) == files_of(documents)


def test_copy_removes_what_killed_copy_left(documents: Path, tmp_path: Path) -> None:
    left = tmp_path / "to/train/00000.arrow.0123456789abcdef.tmp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"some bytes")
    fingerprint = Manifest.read(documents).fingerprint
    claim = {"shards copy": fingerprint, "the packages": ["tokenfeed 0.1"]}
    (tmp_path / "to/.made_by.json").write_text(json.dumps(claim))
    copy_data_set(str(documents), str(tmp_path / "to"))
    assert files_of(tmp_path / "to") == files_of(documents)


@pytest.mark.parametrize("content", ["no json", '{"format_version": 2}', "{}"])
def test_a_manifest_that_says_nothing_here_is_not_written_over(
    documents: Path, tmp_path: Path, content: str
) -> None:
    to = tmp_path / "to"
    shutil.copytree(documents, to)
    (to / "manifest.json").write_text(content)
    (to / "train/00000.arrow").write_bytes(b"of another data set")
    before = files_of(to)
    with pytest.raises(ConfigError, match=r"^[^\n]*To complete this copy nevertheless, delete "):
        copy_data_set(str(documents), str(to))
    assert files_of(to) == before


def test_a_store_that_does_not_answer_is_waited_for_once(
    documents: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each file, nor is a data set called damaged for it."""
    copy_data_set(str(documents), remote.store.name)
    hasty, from_url = replace(FAST, give_up_s=0.5, read_s=0.2), ObjectStore.from_url
    monkeypatch.setattr(ObjectStore, "from_url", lambda url: replace(from_url(url), timing=hasty))
    remote.proxy.match, remote.proxy.always = ".arrow", Fault("503")
    remote.proxy.seen.clear()
    result = call(main, "verify", remote.store.name, expect=1)
    assert result.stdout == ""
    assert re.fullmatch(
        "error: .*00000.arrow: .*: failed for .*: nothing is lost.\n", result.stderr
    )
    assert len({line for line in remote.proxy.seen if ".arrow" in line and "PUT" not in line}) < 3


def test_who_interrupts_a_copy_that_is_sent_is_told_how_to_end_it_at_once(
    documents: Path,
    remote: Remote,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(copying, "results_of", interrupted)
    with pytest.raises(KeyboardInterrupt, match="the same command continues"):
        copy_data_set(str(documents), f"{remote.store.name}-interrupted")
    assert "a second Ctrl-C ends at once" in caplog.text
