"""An compare names the first difference between two runs, and which of them left the plan."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from delivery import MakeDataset, open_loader, realistic_lengths, small_batches

State = dict[str, Any]


@pytest.fixture
def folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return make_dataset(realistic_lengths(), num_shards=3)


def state_after(folder: Path, batches: int, **options: Any) -> State:
    with open_loader(folder, **{"epochs": None} | options) as loader:
        for _ in islice(loader, batches):
            pass
        state: State = json.loads(json.dumps(loader.state_dict()))
    return state


def test_runs_that_delivered_the_same_have_no_difference(folder: Path) -> None:
    state = state_after(folder, 30)
    assert open_loader(folder).compare(state, state_after(folder, 30, num_workers=1)) is None
