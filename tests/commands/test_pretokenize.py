"""`pretokenize` as its users meet it: a process with arguments, an output folder, an exit code."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from support import warm
from support.commands import COMMAND, call, error_of, run, run_json
from support.corpora import texts, write_ballast, write_long_corpus
from support.data_sets import files_of
from support.pretokenizing import make
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools import shards
from tokenfeed.tools.pretokenizing import inputs


def test_output_is_the_same_bytes_with_one_and_two_workers(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    write_ballast(corpus)
    options = ("--tokenizer", tokenizer, "--shard-size", "30KB", "--validation", "0.1")
    for workers in (1, 2):
        run(corpus, tmp_path / f"out{workers}", *options, "--workers", workers)
    made = files_of(tmp_path / "out1")
    assert made == files_of(tmp_path / "out2")
    assert made["tokenizer.json"] == tokenizer.read_bytes()
    assert sum(name.startswith("train/") for name in made) >= 10
    assert any(name.startswith("validation/") for name in made)
    assert not any(name.endswith(".tmp") or ".parts" in name for name in made)


def test_training_a_tokenizer_is_part_of_what_repeats(corpus: Path, tmp_path: Path) -> None:
    for out in ("one", "two"):
        run(corpus, tmp_path / out, "--vocab-size", 400)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    summary = run_json(corpus, tmp_path / "three")
    assert summary["vocabulary_size"] < summary["vocabulary_wanted"] == 32_768
    assert summary["end_token"] == "<|endoftext|>"


def test_the_ledger_closes_and_the_summary_agrees(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    summary = run_json(corpus, out, "--tokenizer", tokenizer.parent, "--shard-size", "30KB")
    ledger = Manifest.read(out).ledger
    assert (ledger.files, ledger.read, ledger.written) == (61, 263, 260)
    assert (ledger.empty, ledger.rejected) == (1, 2)
    text_bytes = sum(len(text.encode()) for text in texts(60) + texts(200, seed=1))
    assert ledger.bytes == summary["text_bytes"] == text_bytes
    assert (summary["documents"], summary["empty"], summary["rejected"]) == (260, 1, 2)
    sources = [json.loads(line) for line in (out / "sources.jsonl").read_text().splitlines()]
    assert sum(source["read"] for source in sources) == 263
    assert sources[60]["path"] == str(corpus / "lines.jsonl")
    rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert [(reject["file"], reject["record"]) for reject in rejects] == [
        (str(corpus / "lines.jsonl"), 201),
        (str(corpus / "lines.jsonl"), 202),
    ]


def test_bad_input_is_one_line_and_writes_nothing(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank/a.txt").touch()
    (tmp_path / "no.json").write_text("{}")
    given = ("--tokenizer", tokenizer)
    cases: list[tuple[tuple[object, ...], int, str]] = [
        ((tmp_path / "gone", out, *given), 1, "gone: not found"),
        ((tmp_path / "empty", out, *given), 1, "no input file found"),
        ((tmp_path / "blank", out, *given), 1, "every document is empty"),
        ((tmp_path / "blank", out), 1, "no text to train a tokenizer on"),
        ((corpus / "lines.jsonl", out, *given, "--field", "text=x"), 1, "record 0: no field `x`"),
        ((corpus / "lines.jsonl", out, "--field", "text=x"), 1, "record 0: no field `x`"),
        ((corpus, out, "--tokenizer", tmp_path / "no.json"), 1, "is not a tokenizer.json"),
        ((corpus, out, "--tokenizer", tmp_path / "empty"), 1, "tokenizer.json: not found. Give"),
        (
            (corpus, out, "--tokenizer", "some-one/some-model"),
            1,
            "the Hub did not return it",
        ),
        ((corpus, out, *given, "--end-token", "<x>"), 2, "'<x>' is not in the vocabulary"),
        ((corpus, corpus / "00.txt", *given), 2, "is not a folder"),
        ((corpus, corpus, *given), 2, "already holds other data (00.txt)"),
    ]
    for arguments, code, words in cases:
        with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):  # else it is asked twice
            assert words in error_of(*arguments, expect=code), arguments
        assert not out.exists(), arguments


@pytest.mark.usefixtures("cold_workers")
def test_no_process_of_a_run_imports_pandas(
    corpus: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow does, a fifth of a second long, for what can be had without."""
    write_ballast(corpus)
    table = pa.table({"text": texts(50)})
    parquet.write_table(table, corpus / "table.parquet")
    csv.write_csv(table, corpus / "table.csv")
    noted = tmp_path / "noted"
    (tmp_path / "pandas.py").write_text(f"open({str(noted)!r}, 'w').close()\nraise ImportError")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    words = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.save(str(tmp_path / "tokenizer.json"))
    for engine, name in (("gigatoken", tokenizer), ("tokenizers", tmp_path / "tokenizer.json")):
        made = run_json(corpus, tmp_path / engine, "--tokenizer", name)
        assert made["engine"].startswith(engine)
    assert not noted.exists()


def test_of_two_that_start_at_once_one_is_refused(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    write_long_corpus(corpus)
    words = [*COMMAND[1:], corpus, tmp_path / "out", "--tokenizer", tokenizer]
    started = [
        warm.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)
    ]
    ended = sorted((process.communicate(timeout=60)[1], process.returncode) for process in started)
    assert sorted(code for _, code in ended) == [0, 2]
    (refusal,) = (stderr for stderr, code in ended if code == 2)
    assert "another run is writing here" in refusal or "already holds a finished" in refusal
    call(shards.main, "verify", tmp_path / "out")


def test_limit_found_by_workers_is_the_same(
    corpus: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"limit": 20, "shard_size": "20KB", "workers": 2}
    make(corpus, tmp_path / "alone", tokenizer, **options)
    monkeypatch.setattr(inputs, "COUNTED_ALONE_BYTES", 0)
    make(corpus, tmp_path / "out", tokenizer, **options)
    assert Manifest.read(tmp_path / "out").splits["train"].rows == 20
    assert files_of(tmp_path / "out") == files_of(tmp_path / "alone")
