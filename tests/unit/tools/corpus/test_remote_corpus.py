"""A corpus in a store gives the rows of the same files in a folder, or ends with one line."""

import bz2
import gzip
import itertools
import json
import lzma
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.corpora import texts
from support.data_sets import files_of
from support.object_server import (
    FAULTS,
    Fault,
    Remote,
    StoredObject,
    set_google,
)
from support.pretokenizing import make

from tokenfeed.pipeline.errors import ConfigError, CorpusError, TokenfeedError
from tokenfeed.tools.corpus.blocks import Blocks
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.corpus.sources import Corpus, find_corpus
from tokenfeed.tools.corpus.units import read_records, read_texts

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of every kind, and what is left out."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a").mkdir()
    (folder / "a" / "one.txt").write_text("one text")
    (folder / "a.txt").write_text("in a folder this stands behind the folder a")
    (folder / "a" / "empty").write_text("")
    (folder / "nul").write_bytes(b"a\0b")
    rows = [{"text": text} for text in texts(40, seed=4)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "big.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[:9000]))
    (folder / "c.jsonl.bz2").write_bytes(bz2.compress(lines[:9000]))
    (folder / "d.jsonl.xz").write_bytes(lzma.compress(lines[:9000]))
    (folder / "e.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(lines)[:-900])
    (folder / "list.json").write_text(json.dumps(rows[:9]))
    (folder / "rows.csv").write_text("text\nfirst\nsecond\n")
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "rows.parquet", row_group_size=7)
    with pa.ipc.new_file(folder / "rows.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    for left_out in (".hidden/x.txt", "__pycache__/x.txt", "made/.parts/job.json", "made/x.txt"):
        (folder / left_out).parent.mkdir(parents=True, exist_ok=True)
        (folder / left_out).write_text("not to be read")
    return folder


def put_all(remote: Remote, folder: Path) -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            remote.put(path.relative_to(folder).as_posix(), path.read_bytes())
    return f"s3://{remote.prefix}"


@pytest.mark.slow
def test_the_shards_are_those_of_a_folder(
    folder: Path, tokenizer: Path, remote: Remote, tmp_path: Path
) -> None:
    url = put_all(remote, folder)
    options = {"validation": 0.1, "exclude": ("c.*",)}
    make(folder, tmp_path / "local", tokenizer, **options)
    remote.proxy.schedule.extend(each for kind in FAULTS[:8] for each in (Fault(kind), None, None))
    make(url, tmp_path / "remote", tokenizer, **options)
    local, made = files_of(tmp_path / "local"), files_of(tmp_path / "remote")
    assert len([name for name in local if name.endswith(".arrow")]) > 8
    named = local.pop("sources.jsonl").replace(str(folder).encode(), url.encode())
    assert made.pop("sources.jsonl") == named
    rejects = local.pop("rejects.jsonl").replace(str(folder).encode(), url.encode())
    assert made.pop("rejects.jsonl") == rejects
    for name in ("manifest.json", ".made_by.json"):
        del local[name], made[name]
    assert made == local


def test_files_come_in_the_order_of_a_folder(
    folder: Path, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    url = put_all(remote, folder)
    caplog.set_level("INFO")

    def named(root: str, corpus: Corpus) -> list[str]:
        return [source.name.removeprefix(root) for source in corpus.sources]

    there = find_corpus((url,), out=None, field="text")
    here = find_corpus((str(folder),), out=None, field="text")
    assert named(url, there) == named(str(folder), here)
    assert len(there.binary) == 1
    for root in (url, folder):
        assert f"{root}/made: left out, it is a data set of pretokenize" in caplog.messages
    for exclude in ("*.jsonl*", "a", "a/*", "*/one.txt", "s*", "[k-z]*", "./one.txt"):
        given = find_corpus((url,), out=None, field="text", exclude=(exclude,))
        here = find_corpus((str(folder),), out=None, field="text", exclude=(exclude,))
        assert named(url, given) == named(str(folder), here)


def test_an_object_may_be_given_by_itself(
    folder: Path, tokenizer: Path, remote: Remote, tmp_path: Path
) -> None:
    url = put_all(remote, folder)
    (source,) = find_corpus((f"{url}/big.jsonl",), out=None, field="text").sources
    assert source.name == f"{url}/big.jsonl"
    web = f"{remote.proxy.url}/{remote.prefix}/rows.parquet"
    made = make(web, tmp_path / "out", tokenizer)
    assert made.documents == 40
    assert json.loads((tmp_path / "out/sources.jsonl").read_text())["path"] == web


Change = Callable[[Remote], Any]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda remote: remote.put("x.jsonl", b'{"text": "other"}\n' * 9), "changed while"),
        (lambda remote: remote.server.objects.clear(), "vanished while"),
    ],
)
def test_a_change_while_the_corpus_is_read_is_an_error_and_no_mixture(
    change: Change, words: str, remote: Remote
) -> None:
    remote.put("x.jsonl", b"".join(b'{"text": "%d"}\n' % n for n in range(9)))
    url = f"s3://{remote.prefix}/x.jsonl"
    (source,) = find_corpus((url,), out=None, field="text").sources
    change(remote)
    with pytest.raises(CorpusError, match=f"^{url}: {words} the corpus was read. Put it back"):
        list(read_records(FilePart(source=source, weight_bytes=1), {"text": FieldKind.TEXT}))


@pytest.mark.parametrize("is_weak", [False, True])
def test_a_change_is_found_where_the_server_knows_no_conditions(
    is_weak: bool, remote: Remote
) -> None:
    one, other = (
        StoredObject(data, modified="Sun, 01 Jan 2017 00:00:00 GMT") for data in (b"1", b"2")
    )
    remote.server.lies, name = True, f"{remote.prefix}/x.txt"
    remote.server.objects[name] = one
    if is_weak:
        remote.server.etags = (f"W/{remote.server.objects[name].etag}" for _ in itertools.count())
    url = f"{remote.proxy.url}/{name}"
    (source,) = find_corpus((url,), out=None, field="text").sources
    assert b"".join(Blocks(source.path)) == b"1"
    remote.server.objects[name] = other
    with pytest.raises(CorpusError, match=f"^{url}: changed while the corpus was read"):
        list(Blocks(source.path))


def test_a_folder_of_google_is_read_by_the_numbers_of_its_versions(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_google(monkeypatch, tmp_path, remote)
    remote.put("x.txt", b"one")
    (source,) = find_corpus((f"gs://{remote.prefix}",), out=None, field="text").sources
    assert list(read_texts(FilePart(source=source, weight_bytes=1), {"text": FieldKind.TEXT})) == [
        b"one"
    ]
    assert source.state == str(remote.server.objects[f"{remote.prefix}/x.txt"].generation)


def test_a_store_that_fails_ends_the_run_and_is_no_damage(
    tokenizer: Path, remote: Remote, tmp_path: Path
) -> None:
    remote.put("x.jsonl", b'{"text": "one"}\n')
    corpus = find_corpus((f"s3://{remote.prefix}",), out=None, field="text")
    remote.proxy.always = Fault("403")
    (source,) = corpus.sources
    with pytest.raises(TokenfeedError, match="refuses access"):
        next(iter(Blocks(source.path)))
    with pytest.raises(TokenfeedError, match="refuses access"):
        make(f"s3://{remote.prefix}", tmp_path / "out", tokenizer)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("http://{host}/nothing.jsonl", "not found. Give each file by its URL"),
        ("s3://{prefix}/nothing", "no input file found"),
        ("hf://datasets/a", "expected hf://datasets/OWNER/NAME"),
        ("s3://{prefix}/made", "is a data set of pretokenize, not a corpus"),
        ("s3://{prefix}/saved", "looks like a saved data set"),
    ],
)
def test_what_is_no_corpus_is_told(remote: Remote, name: str, words: str) -> None:
    for file in ("made/manifest.json", "made/tokenizer.json", "made/train/00000.arrow"):
        remote.put(file, b"{}")
    for file in ("saved/state.json", "saved/dataset_info.json"):
        remote.put(file, b"{}")
    url = name.format(host=f"127.0.0.1:{remote.proxy.port}", prefix=remote.prefix)
    with pytest.raises((ConfigError, CorpusError), match=f"{url}: {words}"):
        find_corpus((url,), out=None, field="text")


def test_the_url_of_a_file_is_quoted_as_urls_are(remote: Remote) -> None:
    host, name = f"http://127.0.0.1:{remote.proxy.port}/{remote.prefix}", "ä b+100%.txt"
    remote.put(name, b"one")
    for said in (name, quote(name)):
        (source,) = find_corpus((f"{host}/{said}",), out=None, field="text").sources
        assert b"".join(Blocks(source.path)) == b"one"


def test_small_objects_are_fetched_once(tokenizer: Path, remote: Remote, tmp_path: Path) -> None:
    for number in range(30):
        remote.put(f"{number}.txt", b"text %d" % number)
    remote.put("more.jsonl.zst", zstandard.compress(b'{"text": "one"}\n'))
    url = f"s3://{remote.prefix}"
    find_corpus((url,), out=None, field="text")
    assert not [line for line in remote.proxy.seen if ".zst" in line]
    remote.proxy.seen.clear()
    assert make(url, tmp_path / "out", tokenizer).documents == 31
    assert len([line for line in remote.proxy.seen if ".txt" in line]) == 30


def test_small_objects_are_fetched_several_at_once(
    tokenizer: Path, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        remote.put(f"{number}.jsonl", b'{"text": "number %d"}\n' % number)
    waiting: set[str] = set()
    together, alone = threading.Event(), list[str]()

    def held(line: str) -> None:
        """Answer a request for one of the last four objects when all four are asked for."""
        if re.search(r"[4-7]\.jsonl", line):
            waiting.add(line)
            if len(waiting) == 4:
                together.set()
            if not together.wait(60):
                alone.append(line)

    monkeypatch.setattr(remote.proxy, "fault_of", held)
    made = make(f"s3://{remote.prefix}", tmp_path / "out", tokenizer)
    assert made.documents == 8
    assert alone == []
