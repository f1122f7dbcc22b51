"""recipes/nanochat_loader.py: what nanochat and nanoGPT receive, and where they resume."""

import json
import runpy
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT
from support.hub_models import write_shards

from tokenfeed import Packed, ShardLoader

EXAMPLE = runpy.run_path(str(ROOT / "recipes/nanochat_loader.py"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("lm") / "shards", "lm")


def next_tokens(ids: torch.Tensor, documents: torch.Tensor, ignored: int) -> torch.Tensor:
    """Slot by slot: the next token of the same document."""
    rows, length = ids.shape
    targets = torch.full_like(ids, ignored)
    for row in range(rows):
        for at in range(length - 1):
            if documents[row, at] == documents[row, at + 1]:
                targets[row, at] = ids[row, at + 1]
    return targets


def nanochat_batches(shards: Path, split: str = "train", **settings: Any) -> Iterator[Any]:
    settings["num_workers"] = 0
    batches: Iterator[Any] = EXAMPLE["shard_loader_with_state"](
        shards, 4, 16, split, "cpu", **settings
    )
    return batches


@pytest.mark.parametrize("split", ["train", "val"])
def test_nanochat_gets_targets_of_the_same_document(shards: Path, split: str) -> None:
    batching, name = Packed(16, 4, last="fill", split=True), {"val": "validation"}.get(split, split)
    with ShardLoader(shards, batching=batching, split=name, num_workers=0) as loader:
        expected = list(loader)
    made = list(islice(nanochat_batches(shards, split), len(expected)))
    for (inputs, targets, _), batch in zip(made, expected, strict=True):
        assert inputs.shape == targets.shape == (4, 16)
        assert inputs.equal(batch.input_ids)
        wanted = next_tokens(batch.input_ids, batch.seq_idx, -1)
        is_padding = torch.arange(16) >= torch.from_numpy(batch.lengths)[:, None]
        assert targets.equal(wanted.masked_fill_(is_padding, -1))


def test_nanochat_resumes_with_the_batch_it_had_fetched(shards: Path) -> None:
    made = list(islice(nanochat_batches(shards), 12))
    for number in (0, 5, 11):  # several epochs
        state = json.loads(json.dumps(made[number][2]))
        again = list(islice(nanochat_batches(shards, resume_state_dict=state), 12 - number))
        for (inputs, targets, place), expected in zip(again, made[number:], strict=True):
            assert inputs.equal(expected[0])
            assert targets.equal(expected[1])
            assert place == expected[2]
    assert {"epoch", "pq_idx", "rg_idx"} <= made[0][2].keys()
