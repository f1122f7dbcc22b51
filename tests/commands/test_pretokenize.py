"""`pretokenize` as its users meet it: a process with arguments, an output folder, an exit code."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from support import warm
from support.commands import COMMAND, call, run, run_json
from support.corpora import texts, write_ballast, write_long_corpus
from support.data_sets import files_of
from support.pretokenizing import make
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools import shards
from tokenfeed.tools.pretokenizing import prepare


def test_training_a_tokenizer_is_part_of_what_repeats(corpus: Path, tmp_path: Path) -> None:
    for out in ("one", "two"):
        run(corpus, tmp_path / out, "--vocab-size", 400)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    summary = run_json(corpus, tmp_path / "three")
    assert summary["vocabulary_size"] < summary["vocabulary_wanted"] == 32_768
    assert summary["end_token"] == "<|endoftext|>"


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
    ended = sorted((process.communicate(timeout=300)[1], process.returncode) for process in started)
    assert sorted(code for _, code in ended) == [0, 2]
    (refusal,) = (stderr for stderr, code in ended if code == 2)
    assert "another run is writing here" in refusal or "already holds a finished" in refusal
    call(shards.main, "verify", tmp_path / "out")


def test_limit_found_by_workers_is_the_same(
    corpus: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"limit": 20, "shard_size": "20KB", "workers": 2}
    make(corpus, tmp_path / "alone", tokenizer, **options)
    monkeypatch.setattr(prepare, "COUNTED_ALONE_BYTES", 0)
    make(corpus, tmp_path / "out", tokenizer, **options)
    assert Manifest.read(tmp_path / "out").splits["train"].rows == 20
    assert files_of(tmp_path / "out") == files_of(tmp_path / "alone")
