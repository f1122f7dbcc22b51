"""Processes that make a data set in a store: whichever is killed, the objects are those of a
folder."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import ended_by, run, start
from support.corpora import texts, write_ballast
from support.data_sets import files_of
from support.object_server import Remote, remote_store

pytest.importorskip("obstore")


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    with remote_store(monkeypatch) as remote:
        yield remote


@pytest.mark.long  # `test_remote_output.py` breaks runs off at any change of a store, in process
def test_a_killed_command_from_store_to_store_is_continued_by_the_same(
    corpus: Path, tmp_path: Path, tokenizer: Path, remote: Remote
) -> None:
    for index, text in enumerate(texts(40, seed=2)):
        (corpus / f"more{index:03}.txt").write_text(text * 20)
    write_ballast(corpus)
    for path in corpus.iterdir():
        remote.put(f"in/{path.name}", path.read_bytes())
    given = f"s3://{remote.prefix}/in", f"s3://{remote.prefix}/out"
    options = ("--tokenizer", tokenizer, "--shard-size", "50KB", "--validation", "0.1")
    run(corpus, tmp_path / "plain", *options)
    killed, _ = ended_by(signal.SIGKILL, 3, *given, *options, "--workers", "2")
    assert killed.returncode == -signal.SIGKILL
    ended = start(*given, *options, "--workers", "2", "--json")
    assert '"resumed_units": 0' not in ended.stdout
    plain, prefix = files_of(tmp_path / "plain"), f"{remote.prefix}/out/"
    there = remote.server.objects.items()
    made = {name.removeprefix(prefix): each.data for name, each in there if prefix in name}
    assert made.keys() == plain.keys()
    shards = [name for name in plain if name.endswith(".arrow")]
    assert [made[name] for name in shards] == [plain[name] for name in shards]
