"""Users, passwords and signatures in addresses reach no file and no output of any command."""

import contextlib
import io
import itertools
import json
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import ANY
from urllib.parse import unquote_to_bytes

import pytest
from support.commands import call, run
from support.data_sets import files_of
from support.object_server import (
    Fault,
    ObjectServer,
    StoredObject,
    as_own_process,
    fault_proxy,
    object_server,
    set_endpoint,
)

import tokenfeed
from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.tools import doctor, report, shards, train
from tokenfeed.trainer.models.gpt import SIZES, ModelSize

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


def holds_secret(content: bytes) -> bool:
    """Whether bytes have the secret, also percent-encoded."""
    return SECRET.encode() in content or SECRET.encode() in unquote_to_bytes(content)


def holding_secret(folder: Path) -> list[Path]:
    """The files whose path or content has the secret."""
    paths = sorted(folder.rglob("*"))
    return [
        path
        for path in paths
        if holds_secret(bytes(path)) or (path.is_file() and holds_secret(path.read_bytes()))
    ]


def write_corpus(server: ObjectServer) -> None:
    lines = "".join(json.dumps({"text": f"a text, number {n}"}) + "\n" for n in range(300))
    server.objects["web/a.jsonl"] = StoredObject((lines + '{"no": 1}\n').encode())


def run_pretokenize() -> None:
    from tokenfeed.tools import pretokenize

    pretokenize.main()


@pytest.mark.slow
def test_train_and_report_keep_signatures_secret(
    server: ObjectServer, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "tiny", ModelSize(layers=1, width=32, heads=2))
    said, folder, fresh = Said(), tmp_path / "run", f"X-Amz-Signature={SECRET}-again"
    (tmp_path / "first.json").write_text(
        call(shards.main, "cat", documents, "--rows", 1, "--json").stdout
    )
    call(
        shards.main,
        "select",
        documents,
        tmp_path / "others",
        "--drop",
        "--rows",
        tmp_path / "first.json",
    )
    serve(server, documents, "one")
    serve(server, tmp_path / "others", "two")

    def shards_at(query: str) -> tuple[str, ...]:
        return "--shards", f"{server.url}/one{query}=0.7", f"{server.url}/two{query}=0.3"

    words = ("--device", "cpu", "--model", "tiny", "--cache-dir", tmp_path / "cache")
    words += ("--log-every", 1, "--save-every", 1, "--eval-tokens", 1, "--sequence-length", 16)
    words += ("--micro-batch-tokens", 64, "--step-tokens", 64, "--run-dir", folder)
    said(train.main, *shards_at(SIGNED), *words, "--steps", 1)
    server.signature = fresh
    resumed = ("--resume", "--run-dir", folder, "--steps", 2, "--num-workers", 0)
    said(train.main, *resumed, *shards_at(f"?{fresh}"))
    said(train.main, "--print-config", *shards_at(SIGNED), *words)
    said(report.main, folder)
    refused = tmp_path / "refused"
    said(train.main, "--shards", f"{server.url}/one{SIGNED}", "--run-dir", refused, expect=1)
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


FORMS = {
    "password": f"http://me:{SECRET}@HOST/PATH",
    "user": f"http://{SECRET}@HOST/PATH",
    "encoded": f"http://me%3A{SECRET[0]}%{ord(SECRET[1]):x}{SECRET[2:]}@HOST/PATH",
    "signature": f"http://HOST/PATH?X-Amz-Signature={SECRET}",
    "token": f"http://HOST/PATH?token={SECRET}",
    "bare query": f"http://HOST/PATH?{SECRET}",
    "capitals": f"HTTP://HOST/PATH?{SECRET}",
    "fragment": f"http://HOST/PATH#{SECRET}",
    "keys of a bucket": f"s3://key:{SECRET}@bucket/PATH",
    "quotes": f"s3://key:a '{SECRET}\" <x@bucket/PATH",
    "query of a bucket": f"s3://bucket/PATH?secret={SECRET}",
    "signature of Azure": f"az://box/PATH?sv=1&sig={SECRET}",
    "one slash": f"s3:/key:{SECRET}@bucket/PATH",
    "other scheme": f"ftp://me:{SECRET}@host/PATH",
    "hub": f"hf://me:{SECRET}@datasets/o/n/PATH",
    "query of the hub": f"hf://datasets/o/n/PATH?token={SECRET}",
    "after a prefix": f"hub:https://me:{SECRET}@host/PATH",
}


@pytest.fixture
def walked(
    server: ObjectServer, documents: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> ObjectServer:
    """A server with a corpus, a data set and a tokenizer, which accepts every query."""
    server.signature = ""
    write_corpus(server)
    serve(server, documents, "set")
    server.objects["tok/tokenizer.json"] = StoredObject(tokenizer.read_bytes())
    set_endpoint(monkeypatch, server.port)
    return server


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [None, *(pytest.param(form, marks=pytest.mark.long) for form in FORMS)]
)
def test_no_command_shows_or_stores_secrets_of_addresses(
    form: str | None,
    walked: ObjectServer,
    documents: Path,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each command gets the next form of an address, or `form`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("hello\n" * 50)
    said, host = Said(), walked.url.removeprefix("http://")
    forms = itertools.cycle(FORMS if form is None else [form])

    def at(path: str) -> str:
        return FORMS[next(forms)].replace("HOST", host).replace("PATH", path)

    def go(command: Callable[[], None], *words: object) -> None:
        numbered = (word if word != "OUT" else f"out{len(said.text)}" for word in words)
        said(command, *numbered, expect=ANY)

    def configured(name: str, settings: object) -> str:
        (tmp_path / name).write_text(json.dumps(settings))
        return name

    for corpus, to, *more in (
        (at("web/a.jsonl"), "OUT", "--tokenizer", tokenizer, "--json"),
        ("corpus", at("out"), "--tokenizer", tokenizer),
        ("corpus", "OUT", "--tokenizer", tokenizer, "--exclude", at("*")),
        ("corpus", "OUT", "--tokenizer", tokenizer, "--split", f"train={at('*')}"),
        ("corpus", "OUT", "--tokenizer", at("tok/tokenizer.json")),
        ("corpus", "OUT", "--tokenizer", at("tok"), "--task", "chat", "--chat-template", at("t")),
    ):
        go(run_pretokenize, corpus, to, "--validation", 0, *more)
    for words in (
        ("inspect", at("set")),
        ("verify", at("set"), "--json"),
        ("cat", at("set"), "--json"),
        ("copy", at("set"), "OUT"),
        ("copy", documents, at("copy"), "--json"),
        ("select", at("set"), "OUT", "--where", f"origin {at('*')}"),
        ("select", documents, "OUT", "--rows", at("rows")),
        ("export", at("set"), "OUT", "--json"),
        ("export", documents, at("exported")),
        ("explain", at("set"), "--state", at("state")),
        ("explain", at("set")),
    ):
        go(shards.main, *words)
    go(report.main, at("run"))
    go(doctor.main, "--data-set", at("set"), "--json")
    cpu = ("--device", "cpu", "--eval-tokens", 1, "--sequence-length", 16, "--steps", 1)
    cpu += ("--micro-batch-tokens", 64, "--step-tokens", 64, "--run-dir", "OUT")
    go(train.main, "--shards", at("set"), *cpu)
    go(train.main, "--shards", f"{at('set')}=x", f"{at('a')}=0.5", *cpu, "--print-config")
    for option in ("export", "run-dir", "cache-dir", "model", "config"):
        go(train.main, "--shards", documents, *cpu, f"--{option}", at("x"))
    go(train.main, "--shards", documents, *cpu, "--model", f"hf:{at('x')}")
    go(train.main, *cpu, "--config", configured("given.yaml", {"shards": {at("set"): "x"}}))
    mixing = [{"shards": at("set"), "until_tokens": 1}, {"shards": at("set")}]
    go(train.main, *cpu, "--config", configured("given.yaml", {"mixing": mixing}))
    (tmp_path / "given.yaml").unlink()
    assert said.text
    assert not holds_secret(said.text.encode())
    assert not holding_secret(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_library_shows_no_secrets_of_addresses(
    form: str,
    walked: ObjectServer,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG, "tokenfeed")
    host = walked.url.removeprefix("http://")

    def at(path: str) -> str:
        return FORMS[form].replace("HOST", host).replace("PATH", path)

    def load(path: str | Path) -> str:
        with contextlib.closing(
            tokenfeed.ShardLoader(path, batching=tokenfeed.Padded(64), epochs=None)
        ) as loader:
            next(iter(loader))
            return f"{loader!r} {loader} {loader.stats()} {json.dumps(loader.state_dict())}"

    def encode(source: str | Path, out: str | Path, with_tokenizer: str) -> str:
        return repr(tokenfeed.pretokenize(source, out, tokenizer=with_tokenizer))

    text = ""
    for call_ in (
        lambda: load(at("set")),
        lambda: load(Path(at("set"))),
        lambda: encode(at("web/a.jsonl"), "out", at("tok")),
        lambda: encode(Path(at("web/a.jsonl")), Path(at("out")), str(tokenizer)),
    ):
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            try:
                text += call_()
            except TokenfeedError as error:
                text += "".join(traceback.format_exception(error))
        text += printed.getvalue()
    assert text
    found = [line for line in (text + caplog.text).splitlines() if holds_secret(line.encode())]
    assert not found
    assert not holding_secret(tmp_path)


def test_address_that_server_repeats_stays_secret(
    server: ObjectServer, documents: Path, tmp_path: Path
) -> None:
    serve(server, documents, "set")
    said, says = Said(), f"<Message>not allowed: /set/manifest.json?token={SECRET}</Message>"
    with fault_proxy(server.port) as proxy:
        proxy.always = Fault("403", says=says)
        said(shards.main, "inspect", f"{proxy.url}/set?token={SECRET}", expect=1)
    assert "not allowed" in said.text
    assert SECRET not in said.text
