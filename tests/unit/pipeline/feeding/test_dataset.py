"""Under a plain DataLoader the batches are those of the loader."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.delivery import open_dataset, open_loader, plain, spans
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from tokenfeed.pipeline.errors import ConfigError


def test_epochs_without_an_end_run_over_the_seam(folder: Path) -> None:
    endless = plain(open_dataset(folder, epochs=None), windows=12)
    whole = list(open_loader(folder, epochs=3))
    assert [spans(b) for b in endless] == [spans(b) for b in whole[: len(endless)]]
    assert len(endless) > len(whole) / 3


def test_dataloader_with_pinned_memory_pins_each_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU no thread pins what a DataLoader loads, so the test calls what it would."""
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(id(tensor))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    window_slice = next(iter(DataLoader(open_dataset(folder), batch_size=None)))
    plain_batches = list(window_slice)
    assert not pinned
    batches = list(pin_memory(window_slice))
    assert [spans(b) for b in batches] == [spans(b) for b in plain_batches]
    assert {id(tensor) for batch in batches for tensor in batch.values()} <= set(pinned)


def test_dataloader_with_batch_size_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"`batch_size`=2 of the DataLoader: .*batch_size=None"):
        next(iter(DataLoader(open_dataset(folder), batch_size=2)))


def test_default_device_elsewhere_leaves_batches_on_cpu(folder: Path) -> None:
    with torch.device("meta"):
        batches = [batch for share in open_dataset(folder) for batch in share]
        batches += islice(open_loader(folder, num_workers=0), 2)
        devices = {value.device.type for batch in batches for value in batch.values()}
    assert devices == {"cpu"}


@pytest.mark.parametrize("name", ["device", "num_workers", "timeout", "num_streams"])
def test_dataset_refuses_settings_of_a_loaders_workers(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}`: a ShardDataset has no such setting"):
        open_dataset(folder, **{name: 1})


def test_dataset_takes_the_other_settings_of_a_loader(folder: Path) -> None:
    options: dict[str, Any] = {"order": "file", "id_dtype": "int32", "rank": 1, "world_size": 2}
    batches = [batch for share in open_dataset(folder, **options) for batch in share]
    for ours, theirs in zip(batches, open_loader(folder, **options), strict=True):
        assert ours["input_ids"].equal(theirs["input_ids"])
