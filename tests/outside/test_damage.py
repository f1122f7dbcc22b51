"""A damaged shard: no flipped bit changes what a loader delivers. `shards verify` finds each."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.commands import call
from support.data_sets import sealed_manifest

from tokenfeed import Padded, ShardLoader
from tokenfeed.pipeline.errors import ShardFormatError, TokenfeedError
from tokenfeed.tools import shards

STRIDE = 61
"""Bytes from one flipped bit to the next: coprime to the width of all values."""


def delivered(folder: Path) -> list[tuple[list[list[int]], list[Any]]]:
    with ShardLoader(folder, batching=Padded(4096), num_workers=0) as loader:
        return [(batch["input_ids"].tolist(), loader.explain(batch)) for batch in loader]


def test_a_flipped_bit_is_refused_or_changes_no_row(text_shards: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(text_shards, tmp_path / "set")
    whole, shard = delivered(folder), folder / "train/00000.arrow"
    data, refused = shard.read_bytes(), 0
    for place in range(0, len(data), STRIDE):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        shard.write_bytes(changed)
        try:
            assert delivered(folder) == whole
        except ShardFormatError as error:
            assert str(shard) in str(error)
            assert "\n" not in str(error)
            refused += 1
    assert refused > len(data) // STRIDE // 2


@pytest.mark.parametrize("place", [0.01, 0.5, 0.99])
def test_verify_finds_a_flipped_bit_anywhere(
    text_shards: Path, tmp_path: Path, place: float
) -> None:
    folder = shutil.copytree(text_shards, tmp_path / "set")
    shard = folder / "train/00000.arrow"
    data = bytearray(shard.read_bytes())
    data[int(len(data) * place)] ^= 1
    shard.write_bytes(data)
    assert str(shard) in call(shards.main, "verify", folder, expect=1).stdout


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name in ("rows", "tokens", "batches", "bytes") for change in (-1, 1)]
    + [("longest_row", -1)],
)
def test_a_shard_unlike_its_manifest_is_refused(small_folder: Path, name: str, change: int) -> None:
    path = small_folder / "manifest.json"
    content = json.loads(path.read_text())
    longest = max(content["splits"]["train"]["shards"], key=lambda shard: shard["longest_row"])
    longest[name] += change
    path.write_bytes(sealed_manifest(content))
    with pytest.raises(TokenfeedError):
        delivered(small_folder)
