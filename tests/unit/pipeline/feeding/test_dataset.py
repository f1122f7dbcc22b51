"""Under a plain DataLoader the batches are those of the loader."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.delivery import open_dataset, open_loader, plain, spans

from tokenfeed.pipeline.errors import ConfigError


def test_epochs_without_an_end_run_over_the_seam(folder: Path) -> None:
    endless = plain(open_dataset(folder, epochs=None), windows=12)
    whole = list(open_loader(folder, epochs=3))
    assert [spans(b) for b in endless] == [spans(b) for b in whole[: len(endless)]]
    assert len(endless) > len(whole) / 3


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
    options: dict[str, Any] = {"order": "file", "ignore_index": -1, "rank": 1, "world_size": 2}
    batches = [batch for share in open_dataset(folder, **options) for batch in share]
    for ours, theirs in zip(batches, open_loader(folder, **options), strict=True):
        assert ours["input_ids"].equal(theirs["input_ids"])
        assert ours.targets.equal(theirs.targets)
