"""Scores: a number a row, from files of every format to the batches and back."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from command import WORDS, call, run
from pyarrow import feather

from tokenfeed import Fixed, ShardLoader
from tokenfeed.tools.shards import main


def scored(path: Path, tokenizer: Path) -> Path:
    """A data set of texts, each with a score: its number divided by 7."""
    records = [{"text": text, "to": "dog", "score": at / 7} for at, text in enumerate(WORDS)]
    data = datasets.Dataset.from_list(records)
    match path.suffix:
        case ".arrow":
            feather.write_feather(data.data.table, str(path))
        case ".parquet":
            data.to_parquet(path)
        case ".jsonl":
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        case suffix:
            data.to_csv(path, sep="," if suffix == ".csv" else "\t", index=False)
    out = path.with_name("out")
    options = ("--tokenizer", tokenizer, "--validation", 0, "--workers", 1)
    run(path, out, "--task", "score", "--field", "pair=to", *options)
    return out


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "arrow", "csv", "tsv"])
def test_scores_of_every_format_reach_the_batches_as_they_were(
    suffix: str, tokenizer: Path, tmp_path: Path
) -> None:
    out = scored(tmp_path / f"a.{suffix}", tokenizer)
    batches = list(ShardLoader(out, batching=Fixed(2), num_workers=0))
    assert all(batch["labels"].dtype == torch.float32 for batch in batches)
    assert sum(batch.num_targets for batch in batches) == len(WORDS)
    pairs = [pair for b in batches for pair in zip(b.rows, b["labels"].tolist(), strict=True)]
    assert sorted(pairs) == [(row, float(np.float32(row / 7))) for row in range(len(WORDS))]


def test_a_data_set_of_scores_is_inspected_verified_and_read_back(
    tokenizer: Path, tmp_path: Path
) -> None:
    out = scored(tmp_path / "a.jsonl", tokenizer)
    inspected, verified = (call(main, name, out).stdout for name in ("inspect", "verify"))
    assert "columns input_ids, token_type_ids, score, " in inspected
    assert verified.startswith(f"{out}: good")
    lines = call(main, "cat", out, "--json", "--rows", len(WORDS)).stdout.splitlines()
    scores = [json.loads(line)["score"] for line in lines]
    assert scores == [float(str(np.float32(row / 7))) for row in range(len(WORDS))]
    assert "tokens | score 0.2857143\n" in call(main, "cat", out, "--start", 2).stdout


def test_a_filler_has_no_score(tokenizer: Path, tmp_path: Path) -> None:
    out = scored(tmp_path / "a.jsonl", tokenizer)
    options = {"num_workers": 0, "world_size": 3, "micro_batches_per_step": 4}
    ranks = [ShardLoader(out, batching=Fixed(2), rank=rank, **options) for rank in range(3)]
    batches = [batch for rank in ranks for batch in rank]
    assert any(batch.is_filler for batch in batches)
    for batch in batches:
        assert batch["labels"].isnan().all() == batch.is_filler
    assert sum(batch.num_targets for batch in batches) == len(WORDS)
