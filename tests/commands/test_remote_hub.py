"""hf:// reads whole files of the Hub, each once, and says what the Hub refuses."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import PROGRAMS, warm
from support.corpora import texts
from support.data_sets import files_of
from support.hub_server import HubServer, hub_server

pytest.importorskip("obstore")
URL = "hf://datasets/owner/name@main/folder"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as hub:
        hub.files["main/folder/x"] = b"content"
        yield hub


def started(
    hub: HubServer, home: Path, *words: object, expect: int = 0, run: Any = warm.run
) -> str:
    """What a program printed for which this server is the Hub."""
    settings = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": hub.token or "none",
    }
    result = run(words, env=os.environ | settings)
    assert result.returncode == expect, result.stderr
    assert not re.search("hunter2|Traceback", result.stdout + result.stderr)
    return result.stdout if expect == 0 else result.stderr


def read(hub: HubServer, home: Path, url: str = URL) -> list[str]:
    hub.seen.clear()
    return started(hub, home, PROGRAMS / "remote_program.py", "hub", url).splitlines()


def test_a_file_of_the_hub_is_downloaded_once_however_busy_the_hub_is(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.failing = 2
    *answers, missing = read(hub, tmp_path)
    assert answers == [str(a) for a in (b"content", 7, b"ont", b"nt", b"content")]
    assert missing == f"RemoteMissingError: {URL}/y: not found."
    assert sum(line.startswith("GET") and line.endswith("/x") for line in hub.seen) == 1
    hub.files["main/folder/x"] = b"changed"
    assert read(hub, tmp_path)[0] == str(b"changed")


@pytest.mark.slow
def test_a_repository_of_others_is_told_with_the_remedy(hub: HubServer, tmp_path: Path) -> None:
    hub.private = True
    for line in read(hub, tmp_path):
        assert line.startswith(f"RemoteError: {URL}/")
        assert "`hf auth login`, or set HF_TOKEN" in line


def parquet(rows: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": rows, "unused": ["x" * 9999] * len(rows)}), file)
    return file.getvalue()


def put_data(hub: HubServer) -> None:
    """Files of two branches; those who have no token get none of them."""
    for name in ("a", "b"):
        hub.files[f"v1/data/{name}.parquet"] = parquet(texts(30, seed=ord(name)))
    hub.files["v1/data/notes.txt"] = b"not wanted"
    hub.files["v1/README.md"] = b"a data set card"
    hub.files["v1/more/c.jsonl"] = b'{"text": "one"}\n'
    hub.files["main/data/a.parquet"] = parquet(["another branch"])
    hub.token = "a secret: hunter2"


def pretokenize(hub: HubServer, home: Path, *words: object, **how: Any) -> str:
    return started(hub, home, "-m", "tokenfeed.tools.pretokenize", *words, **how)


def run_cold(words: list[object], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`datasets` reads the environment when it is imported, and cannot be imported anew."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_repository_files_are_read_by_ranges_at_a_commit(
    hub: HubServer, tokenizer: Path, tmp_path: Path
) -> None:
    put_data(hub)
    for name in ("manifest.json", "tokenizer.json", "train/00000.arrow"):
        hub.files[f"v1/made/{name}"] = b"{}"  # a data set of pretokenize
    words = ("--tokenizer", tokenizer, "--validation", 0, "--json")
    url, out = "hf://datasets/owner/name@v1", tmp_path / "out"
    made = json.loads(pretokenize(hub, tmp_path, f"{url}/data/*.parquet", out, *words))
    assert made["documents"] == 60
    assert hub.told_token == [False] * len(hub.told_token)
    assert hub.num_ranges == len(hub.told_token)
    rows = [json.loads(line) for line in (out / "sources.jsonl").read_text().splitlines()]
    at = f"hf://datasets/owner/name@{hub.commit('v1')}"
    assert [row["path"] for row in rows] == [f"{at}/data/a.parquet", f"{at}/data/b.parquet"]
    assert not any(b"hunter2" in content for content in files_of(out).values())
    whole = json.loads(pretokenize(hub, tmp_path, url, tmp_path / "whole", *words))
    assert (whole["documents"], whole["rejected"], whole["files"]) == (62, 0, 4)
    again = pretokenize(hub, tmp_path / "other", f"{url}/data/*.parquet", out, *words)
    assert json.loads(again)["already_finished"]
    hub.files["v1/more/d.jsonl"] = b""
    moved = pretokenize(hub, tmp_path, f"{url}/data/*.parquet", out, *words, expect=2)
    assert "already holds a finished data set, of another command or input" in moved


def test_repository_that_is_not_there_is_one_line(hub: HubServer, tmp_path: Path) -> None:
    put_data(hub)
    for url, words in {
        "hf://datasets/owner/name@v2": "no such repository or revision",
        "hf://datasets/owner/name@v1/nothing": "not found",
        "hf://datasets/owner/name@v1/*.csv": "no input file found",
    }.items():
        said = pretokenize(hub, tmp_path, url, tmp_path / "out", expect=1)
        assert words in said.splitlines()[-1]


@pytest.mark.long
def test_hub_data_set_is_that_of_its_commit_on_every_machine(
    hub: HubServer, tokenizer: Path, tmp_path: Path
) -> None:
    put_data(hub)
    hub.token = ""
    out, words = tmp_path / "out", ("--tokenizer", tokenizer, "--validation", 0)
    given = ("hub:owner/name@v1", out, *words)
    pretokenize(hub, tmp_path / "0", *given, "--part", "0/2", run=run_cold)
    done = pretokenize(hub, tmp_path / "1", *given, "--finish", "--json", run=run_cold)
    assert json.loads(done)["documents"] == 60


def test_tokenizer_of_a_hub_id_takes_a_revision(
    hub: HubServer, tokenizer: Path, tmp_path: Path
) -> None:
    hub.files["v1/tokenizer.json"] = tokenizer.read_bytes()
    hub.files["main/tokenizer.json"] = b"{}"
    (tmp_path / "a.txt").write_text("one text")
    out = tmp_path / "out"
    pretokenize(hub, tmp_path, tmp_path / "a.txt", out, "--tokenizer", "owner/name@v1")
    assert (out / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
