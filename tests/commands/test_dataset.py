"""Under a plain DataLoader the batches are those of the loader."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import warm
from support.delivery import (
    POLICIES,
    MakeDataset,
    delivered,
    open_dataset,
    open_loader,
    plain,
    realistic_lengths,
    same_values,
    shuffled,
    small_batches,
    spans,
)
from torch.utils.data import DataLoader, IterableDataset

from tokenfeed import Padded, ShardDataset, ShardLoader
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.planning.policies import Batching


@pytest.mark.parametrize(
    ("batching", "num_workers"), [(POLICIES[0], 2), *((policy, 0) for policy in POLICIES[1:])]
)
def test_a_plain_dataloader_gives_the_same_batches(
    folder: Path, batching: Batching, num_workers: int
) -> None:
    options = {"rank": 1, "world_size": 2, "micro_batches_per_step": 3, "seed": 5, "epochs": 2}
    ours = list(open_loader(folder, batching, **options))
    theirs = plain(open_dataset(folder, batching, **options), num_workers)
    assert [spans(batch) for batch in theirs] == [spans(batch) for batch in ours]
    for our, their in zip(ours, theirs, strict=True):
        assert same_values(our, their)
        assert (our.is_filler, our.ends_step) == (their.is_filler, their.ends_step)


class Wrapped(IterableDataset[int]):
    """A loader in a data set of torch, as some adopters write it."""

    def __init__(self, loader: ShardLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[int]:
        return (batch.num_tokens for batch in self.loader)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_loader_in_worker_of_dataloader_is_refused(folder: Path, num_workers: int) -> None:
    """With one worker, the loader in the script would save the position of the start."""
    loader = open_loader(folder)
    copies: Any = iter(DataLoader(Wrapped(loader), batch_size=None, num_workers=num_workers))
    with pytest.raises(ConfigError, match="a saved state would stay at the start"):
        list(copies)
    copies._shutdown_workers()  # if Python's collector does it, torch waits 5 s for each worker
    alone = DataLoader(Wrapped(loader), batch_size=None)
    assert sum(alone) == sum(batch.num_tokens for batch in loader)


def test_dataloader_that_collates_slices_is_refused(small_folder: Path) -> None:
    with pytest.raises(ConfigError, match="Set `batch_size`=None"):
        list(DataLoader(ShardDataset(small_folder, Padded(2048))))


def test_accelerate_that_would_divide_slices_is_refused(small_folder: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    def prepared(**settings: Any) -> Any:
        configuration = DataLoaderConfiguration(**settings)
        dataset = ShardDataset(small_folder, Padded(2048))
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        return accelerator.prepare(DataLoader(dataset, batch_size=None))

    with pytest.raises(ConfigError, match="Leave its DataLoader out of `prepare`"):
        next(iter(prepared()))
    assert len(list(prepared(dispatch_batches=False))) > 0  # one rank: nothing to divide


def test_window_beyond_shared_memory_is_refused_in_one_line(
    small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int) -> None:
        raise RuntimeError("unable to allocate shared memory(shm):\nNo space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", refuse)
    worker = SimpleNamespace(id=0, num_workers=1)
    monkeypatch.setattr("tokenfeed.pipeline.feeding.dataset.get_worker_info", lambda: worker)
    with pytest.raises(
        ConfigError, match=r"`window_tokens`, enlarge /dev/shm \(`docker run"
    ) as found:
        next(iter(ShardDataset(small_folder, Padded(2048))))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("task", ["classify", "score", "tag", "complete", "chat"])
def test_labels_come_with_their_rows_from_any_process(
    make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    small_batches(monkeypatch)
    folder = make_dataset(realistic_lengths(), task=task, pairs=True)
    batching = Padded(max_tokens=4096)
    alone = list(open_loader(folder, batching))
    with open_loader(folder, batching, num_workers=1) as loader:
        ours = list(loader)
    theirs = plain(open_dataset(folder, batching), 1)
    for expected, our, their in zip(alone, ours, theirs, strict=True):
        assert same_values(our, expected)
        assert same_values(their, expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_raising_the_epoch_gives_the_next_pass(folder: Path, num_workers: int) -> None:
    dataset = open_dataset(folder)
    loader = open_loader(folder)
    for dataset.epoch in range(2):
        passed = [spans(batch) for batch in plain(dataset, num_workers)]
        assert passed == [spans(batch) for batch in loader]


@pytest.mark.parametrize("start", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_an_epoch_that_is_raised_reaches_workers_that_persist(
    small_folder: Path, start: str
) -> None:
    """A fork server pickles as spawn does, and starts warm."""
    warm.ensure_running()
    dataset = ShardDataset(small_folder, Padded(2048), window_tokens=5_000)
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=start,
    )
    assert delivered(loader) == shuffled(small_folder, 0)
    dataset.epoch += 1
    assert delivered(loader) == shuffled(small_folder, 1)
    dataset.epoch = 0
    assert delivered(loader) == shuffled(small_folder, 0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))])
def test_a_copy_of_a_dataset_has_an_epoch_of_its_own(small_folder: Path, copied: Any) -> None:
    dataset = ShardDataset(small_folder, Padded(2048), window_tokens=5_000)
    assert delivered(dataset) == shuffled(small_folder, 0), "it may have been iterated"
    dataset.epoch = 1
    other = copied(dataset)
    loader = DataLoader(other, batch_size=None, num_workers=1, persistent_workers=True)
    assert delivered(loader) == shuffled(small_folder, 1)
    other.epoch = 0
    assert (dataset.epoch, delivered(loader)) == (1, shuffled(small_folder, 0))
