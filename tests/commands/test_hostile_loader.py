"""Whatever breaks into a loader finds a whole state, and what breaks off loses no batch."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from delivery import MakeDataset, Span, open_loader, realistic_lengths, small_batches, spans
from torch.utils.data import DataLoader

from tokenfeed import Padded, ShardDataset


@pytest.fixture
def folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return make_dataset(realistic_lengths(120, mean=4.5), num_shards=3)


def shuffled(folder: Path, epoch: int) -> list[list[Span]]:
    loader = open_loader(folder, epochs=1, window_tokens=5_000)
    for _ in range(epoch):
        list(loader)
    return [spans(batch) for batch in loader]


def delivered(loader: Any) -> list[list[Span]]:
    return [spans(batch) for share in loader for batch in share]


def test_an_epoch_that_is_raised_reaches_workers_that_persist(folder: Path) -> None:
    dataset = ShardDataset(folder, Padded(2048), window_tokens=5_000)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    assert delivered(loader) == shuffled(folder, 0)
    dataset.epoch += 1
    assert delivered(loader) == shuffled(folder, 1)
    dataset.epoch = 0
    assert delivered(loader) == shuffled(folder, 0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))])
def test_a_copy_of_a_dataset_has_an_epoch_of_its_own(folder: Path, copied: Any) -> None:
    dataset = ShardDataset(folder, Padded(2048), window_tokens=5_000)
    dataset.epoch = 1
    other = copied(dataset)
    loader = DataLoader(other, batch_size=None, num_workers=1, persistent_workers=True)
    assert delivered(loader) == shuffled(folder, 1)
    other.epoch = 0
    assert (dataset.epoch, delivered(loader)) == (1, shuffled(folder, 0))


@pytest.mark.slow
def test_an_epoch_that_is_raised_reaches_workers_that_were_spawned(folder: Path) -> None:
    dataset = ShardDataset(folder, Padded(2048), window_tokens=5_000)
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    assert delivered(loader) == shuffled(folder, 0)
    dataset.epoch += 1
    assert delivered(loader) == shuffled(folder, 1)
