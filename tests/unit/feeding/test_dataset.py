"""Under a plain DataLoader the batches are those of the loader."""

from pathlib import Path
from typing import Any

import pytest
from delivery import (
    open_loader,
    spans,
)
from plain import open_dataset, plain

from tokenfeed.pipeline.errors import ConfigError, ManifestError, ShardFormatError


def test_epochs_without_an_end_run_over_the_seam(folder: Path) -> None:
    endless = plain(open_dataset(folder, epochs=None), windows=12)
    whole = list(open_loader(folder, epochs=3))
    assert [spans(b) for b in endless] == [spans(b) for b in whole[: len(endless)]]
    assert len(endless) > len(whole) / 3


@pytest.mark.parametrize(
    "options",
    [{"rank": 2, "world_size": 2}, {"rank": -1}, {"epochs": 0}, {"micro_batches_per_step": 0}],
)
def test_settings_out_of_range_are_refused(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(options))}`"):
        open_dataset(folder, **options)


def test_a_missing_split_is_named(folder: Path) -> None:
    with pytest.raises(ManifestError, match="no split `validation`"):
        open_dataset(folder, split="validation")


def test_damage_is_named(folder: Path) -> None:
    (folder / "train/00002.arrow").unlink()
    with pytest.raises(ShardFormatError, match=r"00002\.arrow"):
        plain(open_dataset(folder))
