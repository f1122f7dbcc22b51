"""Users, passwords and signatures in addresses reach no file and no output of any command."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import call, run
from support.data_sets import files_of
from support.object_server import ObjectServer, StoredObject, as_own_process, object_server

from tokenfeed.tools import report, shards, train

pytest.importorskip("obstore")
SECRET = "hunter2"
SIGNED = f"?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}%2Fb"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    as_own_process(monkeypatch)
    with object_server() as server:
        server.signature = SIGNED[1:]
        yield server


class Said:
    """Runs commands, and keeps all that they print."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, command: Callable[[], None], *words: object, expect: int = 0) -> None:
        result = call(command, *words, expect=expect)
        self.text += result.stdout + result.stderr


def serve(server: ObjectServer, folder: Path, place: str) -> None:
    for name, content in files_of(folder).items():
        server.objects[f"{place}/{name}"] = StoredObject(content)


def holding_secret(folder: Path) -> list[Path]:
    """The files whose path or content has the secret."""
    paths = sorted(folder.rglob("*"))
    return [
        path
        for path in paths
        if SECRET in str(path) or (path.is_file() and SECRET.encode() in path.read_bytes())
    ]


def write_corpus(server: ObjectServer) -> None:
    lines = "".join(json.dumps({"text": f"a text, number {n}"}) + "\n" for n in range(300))
    server.objects["web/a.jsonl"] = StoredObject((lines + '{"no": 1}\n').encode())


def test_commands_of_shards_keep_signatures_secret(
    server: ObjectServer, tokenizer: Path, tmp_path: Path
) -> None:
    write_corpus(server)
    said, out, url = Said(), tmp_path / "out", f"{server.url}/web/a.jsonl"
    words = ("--tokenizer", tokenizer, "--validation", 0)
    said(run_pretokenize, f"{url}{SIGNED}", out, *words)
    assert json.loads((out / "sources.jsonl").read_text())["path"] == url
    serve(server, out, "set")
    signed = f"{server.url}/set{SIGNED}"
    said(shards.main, "inspect", signed)
    said(shards.main, "inspect", signed, "--json")
    said(shards.main, "cat", signed, "--rows", 2)
    said(shards.main, "verify", signed)
    said(shards.main, "copy", signed, tmp_path / "copy")
    (out / "train/00000.arrow").unlink()
    said(shards.main, "copy", signed, out)
    state = {"no": "state"}
    (tmp_path / "state.json").write_text(json.dumps(state))
    said(shards.main, "explain", signed, "--state", tmp_path / "state.json", expect=1)
    server.signature = "another"
    for words in (["inspect"], ["cat"], ["verify"], ["copy", tmp_path / "new"]):
        said(shards.main, words[0], signed, *words[1:], expect=1)
    said(run_pretokenize, f"{url}{SIGNED}", tmp_path / "new", expect=1)
    assert "refuses access" in said.text
    assert SECRET not in said.text
    assert not holding_secret(tmp_path)


def run_pretokenize() -> None:
    from tokenfeed.tools import pretokenize

    pretokenize.main()


@pytest.mark.slow
def test_train_and_report_keep_signatures_secret(
    server: ObjectServer, documents: Path, tmp_path: Path
) -> None:
    said, folder, fresh = Said(), tmp_path / "run", f"X-Amz-Signature={SECRET}-again"
    serve(server, documents, "one")
    serve(server, documents, "two")

    def shards_at(query: str) -> tuple[str, ...]:
        return "--shards", f"{server.url}/one{query}=0.7", f"{server.url}/two{query}=0.3"

    words = ("--device", "cpu", "--model", "tiny", "--cache-dir", tmp_path / "cache")
    words += ("--log-every", 1, "--save-every", 1, "--eval-tokens", 1, "--sequence-length", 16)
    words += ("--micro-batch-tokens", 64, "--step-tokens", 64, "--run-dir", folder)
    said(train.main, *shards_at(SIGNED), *words, "--steps", 1)
    server.signature = fresh
    said(train.main, "--resume", "--run-dir", folder, *shards_at(f"?{fresh}"), "--steps", 2)
    upload = f"ftp://me:{SECRET}@host/x"
    said(train.main, "--print-config", *shards_at(SIGNED), *words, "--upload", upload)
    said(train.main, "--dry-run", *shards_at(f"?{fresh}"), *words)
    said(report.main, folder)
    said(report.main, "compare", folder, folder)
    refused = tmp_path / "refused"
    said(train.main, "--shards", f"{server.url}/one{SIGNED}", "--run-dir", refused, expect=1)
    assert SECRET not in said.text
    assert not holding_secret(tmp_path)


def test_user_in_web_address_is_refused_without_showing_it(
    server: ObjectServer, tmp_path: Path
) -> None:
    said = Said()
    host = server.url.removeprefix("http://")
    for user in (f"me:{SECRET}", SECRET, f"me:{SECRET}/x", f"me:p@{SECRET}", f"me:#{SECRET}?"):
        url = f"http://{user}@{host}/web/a.jsonl"
        said(run_pretokenize, url, tmp_path / "out", expect=2)
        said(shards.main, "inspect", url, expect=2)
        said(shards.main, "copy", url, tmp_path / "out", expect=2)
        said(shards.main, "copy", tmp_path, url.replace("http:", "s3:"), expect=2)
        said(train.main, "--shards", url, expect=2)
    assert "contains a user" in said.text
    assert SECRET not in said.text
    assert not holding_secret(tmp_path)


def test_pretokenize_continues_with_fresh_signature(
    server: ObjectServer, tokenizer: Path, tmp_path: Path
) -> None:
    write_corpus(server)
    out, url = tmp_path / "out", f"{server.url}/web/a.jsonl"
    words = (out, "--tokenizer", tokenizer, "--validation", 0)
    run(f"{url}{SIGNED}", *words)
    server.signature = "sig=2"
    again = json.loads(run(f"{url}?sig=2", *words, "--json").stdout)
    assert again["already_finished"]


def test_two_addresses_that_differ_in_their_query_are_refused(
    server: ObjectServer, tmp_path: Path
) -> None:
    write_corpus(server)
    server.signature = ""
    url = f"{server.url}/web/a.jsonl"
    result = run(f"{url}?id=1", f"{url}?id=2", tmp_path / "out", expect=2)
    assert f"{url}: is given twice" in result.stderr
