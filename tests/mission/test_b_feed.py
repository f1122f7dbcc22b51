"""The mission, feed: a test for each row of docs/mission.md, by public commands and API."""

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from support.commands import call
from support.training import write_labelled
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from tokenfeed import Batch, Fixed, Packed, Padded, ShardDataset, ShardLoader
from tokenfeed.tools import report, train

SMALL = ("--model", "support.training:one_layer_model", "--device", "cpu", "--log-every", 1)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("feed") / "shards", "lm", count=150)


def rows_of(batches: Any) -> list[tuple[int, int]]:
    """The row and the first token of each piece that batches deliver."""
    found = []
    for batch in batches:
        starts = np.zeros(len(batch.rows), int) if batch.starts is None else batch.starts
        found += [*zip(batch.rows.tolist(), starts.tolist(), strict=True)] * (not batch.is_filler)
    return found


# ---------- m05 ----------


def rows_with(
    shards: Path, batching: Padded, num_workers: int, prefetch: int
) -> list[tuple[int, int]]:
    """The rows of an epoch. Check how many batches are ready, and that workers stay."""

    def children() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child not in earlier]

    def batches_in_memory() -> int:
        gc.collect()
        return sum(isinstance(each, Batch) for each in gc.get_objects())

    earlier, before = psutil.Process().children(), batches_in_memory()
    options: dict[str, Any] = {"num_workers": num_workers, "prefetch": prefetch, "epochs": 2}
    with ShardLoader(shards, batching=batching, **options) as loader:
        batches = iter(loader)
        taken = [next(batches)]
        assert batches_in_memory() - before == 1 + prefetch, "that of the loop, and those ready"
        workers = children()
        while loader.position.epoch == 0:
            taken.append(next(batches))
        next(batches)
        assert children() == workers, "workers live as long as the run"
        assert len(workers) == num_workers
    return rows_of(taken)


@pytest.mark.usefixtures("forked_workers")
def test_m05_workers_pinned_memory_and_prefetching(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--shards", shards, "--run-dir", tmp_path / "run", *SMALL, "--steps", 3)
    ended = call(train.main, *words, "--num-workers", 1, "--prefetch", 3)
    choice = "1 loader worker, 3 batches ready ahead, pageable memory"
    assert choice in ended.stderr.split("step 0 |")[0]
    assert choice in call(report.main, tmp_path / "run").stdout
    found = json.loads((tmp_path / "run/report.json").read_text())
    expected = {"num_workers": 1, "prefetch": 3, "pinned": False}
    assert {name: found[name] for name in expected} == expected

    batching = Padded(max_tokens=64)
    expected_rows = rows_of(ShardLoader(shards, batching=batching, num_workers=0))
    for num_workers, prefetch in ((0, 0), (0, 5), (1, 2)):
        assert rows_with(shards, batching, num_workers, prefetch) == expected_rows

    dataset = ShardDataset(shards, batching)
    with pytest.warns(UserWarning, match=r"^'pin_memory' argument is set as true but no acc.*$"):
        slices = list(DataLoader(dataset, batch_size=None, pin_memory=True))
    assert rows_of(batch for each in slices for batch in each) == expected_rows
    pinned: list[torch.Tensor] = []  # where there is an accelerator, torch calls what pins an item

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    for batch in pin_memory(slices[0]):
        assert any(batch["input_ids"] is each for each in pinned)


# ---------- m06 ----------


def test_m06_batches_by_token_budget_equal_steps_and_last(shards: Path) -> None:
    lengths = {
        row: length
        for batch in ShardLoader(shards, batching=Fixed(1), num_workers=0)
        for row, length in zip(batch.rows.tolist(), batch.piece_lengths.tolist(), strict=True)
    }
    policies = {
        Padded: {"max_tokens": 100, "multiple_of": 4, "sequence_length": 40},
        Fixed: {"batch_size": 4},
        Packed: {"sequence_length": 40, "batch_size": 3},
    }
    for policy, sizes in policies.items():
        for last in ("short", "fill", "drop"):
            ranks = [
                ShardLoader(
                    shards,
                    batching=policy(**sizes, last=last),
                    num_workers=0,
                    epochs=2,
                    rank=rank,
                    world_size=2,
                    micro_batches_per_step=2,
                )
                for rank in range(2)
            ]
            passes = [list(loader) for loader in ranks]
            steps = [[batch.ends_step for batch in batches] for batches in passes]
            assert steps[0] == steps[1], "equal batches and steps on each rank"
            stats = ranks[0].stats()
            delivered = sum(loader.stats().tokens for loader in ranks)
            assert delivered + stats.left_out_tokens == 2 * sum(lengths.values())
            shapes = [tuple(batch["input_ids"].shape) for batches in passes for batch in batches]
            if policy is Padded:
                assert max(rows * length for rows, length in shapes) <= 100
            if last == "fill":
                assert set(shapes) <= set(ranks[0].shapes)
            if last == "drop":
                left_out = []
                assert stats.left_out_tokens > 0
                assert not any(batch.is_filler for batches in passes for batch in batches)
                if policy is not Padded:
                    assert {rows for rows, _ in shapes} == {sizes["batch_size"]}
                for half in (slice(None, len(steps[0]) // 2), slice(len(steps[0]) // 2, None)):
                    seen = {row for batches in passes for row, _ in rows_of(batches[half])}
                    left_out.append(set(lengths) - seen)
                assert sum(map(len, left_out)) == stats.left_out_rows
                assert left_out[0] != left_out[1], "each epoch leaves out other rows"
            else:
                assert (stats.left_out_rows, stats.left_out_tokens) == (0, 0)
