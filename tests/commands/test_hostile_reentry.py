"""What comes in between: handlers inside `next`, numbers that are set, copies of what runs."""

import copy
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from delivery import MakeDataset, open_loader, realistic_lengths, small_batches, spans

from tokenfeed import Padded
from tokenfeed.pipeline.feeding.tuner import Tuner

OPTIONS: dict[str, Any] = {"batching": Padded(2048), "window_tokens": 5_000, "epochs": None}


ROUNDS = 12


@pytest.fixture
def folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return make_dataset(realistic_lengths(120, mean=4.5), num_shards=3)


def test_a_number_of_workers_that_was_set_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tuner, "suggest", lambda self, num_workers: 1)
    with open_loader(folder, num_workers="auto", **OPTIONS) as loader:
        next(iter(loader))
        loader.num_workers = 2
        for _ in islice(loader, ROUNDS):
            assert loader.num_workers == 2


def copied_by_pickle(anything: Any) -> Any:
    return pickle.loads(pickle.dumps(anything))


@pytest.mark.parametrize("copied", [copy.deepcopy, copied_by_pickle])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_is_copied_while_it_runs(folder: Path, num_workers: int, copied: Any) -> None:
    with open_loader(folder, num_workers=num_workers, **OPTIONS) as loader:
        next(iter(loader))
        with copied(loader) as other:
            rest = [spans(batch) for batch in islice(other, ROUNDS)]
        assert rest == [spans(batch) for batch in islice(loader, ROUNDS)]
