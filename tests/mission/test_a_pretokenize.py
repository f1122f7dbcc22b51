"""The mission, pretokenize: a test for each row of docs/mission.md, by public commands and API."""

import contextlib
import json
import os
import re
import signal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from support import warm
from support.commands import COMMAND, call, ended_by, run, run_json
from support.corpora import texts
from support.data_sets import files_of

from tokenfeed import Manifest
from tokenfeed.tools import shards
from tokenfeed.tools.jobs import progress_bar

ZSTD_FRAME = b"\x28\xb5\x2f\xfd"


@pytest.mark.slow
def test_m01_corpus_becomes_shards_once(tmp_path: Path, tokenizer: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(30):
        (corpus / f"{number}.txt").write_text("\n".join(texts(20, seed=number)))
    options = ("--tokenizer", tokenizer, "--shard-size", "20KB")
    run(corpus, tmp_path / "undisturbed", *options, "--workers", 1)
    out = tmp_path / "out"
    killed, _ = ended_by(signal.SIGKILL, 3, corpus, out, *options)
    assert killed.returncode == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    summary = run_json(corpus, out, *options, "--workers", 2)
    assert summary["units"] > summary["resumed_units"] == 3
    assert files_of(out) == files_of(tmp_path / "undisturbed")
    call(shards.main, "verify", out)
    first = out / Manifest.read(out).splits["train"].shards[0].file
    content = first.read_bytes()
    assert content.startswith(b"ARROW1")
    assert ZSTD_FRAME in content
    first.write_bytes(content[:500] + b"?" + content[501:])
    call(shards.main, "verify", out, expect=1)


HUB_ROWS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "SST-2": (
        {"idx": 7, "sentence": "a fine film ", "label": 1},
        ["--task", "classify", "--field", "text=sentence"],
        ["a fine film", "label 1"],
    ),
    "SQuAD": (
        {
            "id": "5733",
            "context": "The tower is tall.",
            "question": "What is tall?",
            "answers": {"text": ["The tower"], "answer_start": [0]},
        },
        [
            *("--task", "complete", "--field", r"prompt={context}\n{question}\n"),
            "completion=answers.text[0]",
        ],
        ["The tower is tall.\nWhat is tall?\nThe tower"],
    ),
    "XSum": (
        {"document": "A long story.", "summary": "Short.", "id": "1"},
        ["--task", "complete", "--field", r"prompt={document}\nSummary: ", "completion=summary"],
        ["A long story.\nSummary: Short."],
    ),
    "CoNLL": (
        {"id": "0", "tokens": ["EU", "rejects"], "pos_tags": [22, 42], "ner_tags": [3, 0]},
        ["--task", "tag", "--field", "tags=ner_tags"],
        ["EU rejects"],
    ),
    "WMT": (
        {"translation": {"de": "Hallo Welt", "en": "Hello world"}},
        [
            *("--task", "complete", "--field", r"prompt={translation.en}\n"),
            "completion=translation.de",
        ],
        ["Hello world\nHallo Welt"],
    ),
    "documents": ({"text": "One document."}, ["--task", "lm"], ["One document."]),
    "chat": (
        {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes"}]},
        ["--task", "chat", "--chat-template", "chat.jinja"],
        ["user: Hi?\nassistant: Yes"],
    ),
}
"""Rows as the Hub stores them, the options for them, and what `shards cat` shows of a row."""


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", HUB_ROWS)
def test_m02_text_for_every_task_of_the_users(
    name: str, kind: str, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.jinja").write_text(
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    row, options, shown = HUB_ROWS[name]
    if kind == "jsonl":
        Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 5)
    else:  # an object is a struct, or a struct of lists
        pq.write_table(pa.Table.from_pylist([row] * 5), "rows.parquet")
    run(f"rows.{kind}", "out", *options, "--tokenizer", tokenizer, "--validation", 0)
    printed = call(shards.main, "cat", "out").stdout
    assert all(text in printed for text in shown), printed
    assert Manifest.read("out").splits["train"].rows == 5


def least_texts(path: Path, validation: float, limit: int) -> list[str]:
    """The texts of the split train that `--limit` keeps, by another way."""
    records = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    usable = [text.encode() for text in records if isinstance(text, str) and text]
    hashed = sorted((xxhash.xxh3_64_intdigest(text), text.decode()) for text in usable)
    return [text for number, text in hashed if number >= validation * 2**64][:limit]


def texts_in(out: Path, split: str = "train") -> list[str]:
    """The texts of a split, sorted."""
    rows = Manifest.read(out).split(split).rows
    words = ("cat", out, "--json", "--split", split, "--rows", rows)
    shown = call(shards.main, *words).stdout.splitlines()
    return sorted(json.loads(line)["text"].removesuffix("</s>") for line in shown)


def test_m03_limit_keeps_the_records_with_the_least_hashes(tmp_path: Path, tokenizer: Path) -> None:
    records: list[object] = [*texts(500, seed=3), *texts(20, seed=3), *[7, None, ""] * 40]
    options = ("--tokenizer", tokenizer, "--validation", 0.2, "--shard-size", "10KB")
    kept = {}
    for seed in (1, 2):
        rows = tmp_path / f"{seed}.jsonl"
        Random(seed).shuffle(records)
        rows.write_text("".join(f"{json.dumps({'text': text})}\n" for text in records))
        for limit in (50, 10_000):
            out = tmp_path / f"{seed}-{limit}"
            if seed == 1:
                run(rows, out, *options, "--limit", limit, "--workers", 2)
            else:  # the same by parts
                for part in ("1/2", "0/2"):
                    run(rows, out, *options, "--limit", limit, "--part", part)
            ledger = Manifest.read(out).ledger
            left_out = ledger.left_out or 0
            assert ledger.read == ledger.written + ledger.empty + ledger.rejected + left_out == 640
            assert texts_in(out) == sorted(least_texts(rows, 0.2, limit))
            assert (left_out == 0) == (limit == 10_000)
            kept[seed, limit] = texts_in(out), texts_in(out, "validation")
    assert len(kept[1, 50][0]) == 50
    assert kept[1, 50] == kept[2, 50]
    assert kept[1, 50][1] == kept[1, 10_000][1]  # other splits are kept


def test_m04_progress_rejects_and_a_ledger_that_closes(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": text}) for text in texts(300, seed=4)]
    lines[7:10] = ['{"text": 5}', "not JSON", '{"text": ""}']
    rows.write_text("\n".join(lines))
    options = ("--tokenizer", tokenizer, "--shard-size", "10KB")

    pty = pytest.importorskip("pty")  # not on Windows
    main, terminal = pty.openpty()
    words = [*COMMAND[1:], rows, tmp_path / "shown", *options]
    with open(terminal, "w") as stderr:
        process = warm.Popen(words, stderr=stderr, env=os.environ | {"COLUMNS": "150"})
    bar = seen_in(main, process)
    assert re.search(r"[0-9]+/[0-9]+ units .*[kM]B/s .*M tokens/s .*[0-9]+:[0-9]{2}:[0-9]{2}", bar)

    monkeypatch.setattr(progress_bar, "_LINE_SECONDS", 0)  # a line a minute, at once
    result = run(rows, tmp_path / "out", *options)
    line = r"[1-9]/[0-9]+ units, [0-9]+%, [0-9.]+ MB/s, [0-9.]+ M tokens/s, 0:00:0[0-9] left"
    assert re.search(line, result.stderr), result.stderr

    rejects = [
        json.loads(line) for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()
    ]
    assert [(reject["file"], reject["line"]) for reject in rejects] == [
        (str(rows), 8),
        (str(rows), 9),
    ]
    assert "expected text" in rejects[0]["reason"]
    assert "not JSON" in rejects[1]["reason"]
    assert "300 read = 297 written + 1 empty + 2 rejected" in result.stdout


def seen_in(descriptor: int, process: warm.Popen) -> str:
    """What a process writes to a terminal, without codes of colors."""
    seen = b""
    with contextlib.suppress(OSError):  # when its last writer has closed it
        while block := os.read(descriptor, 4096):
            seen += block
    assert process.wait(300) == 0
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
