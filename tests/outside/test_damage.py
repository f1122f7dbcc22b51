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


def test_verify_finds_a_flipped_bit_in_each_file(text_shards: Path, tmp_path: Path) -> None:
    """Of the beginning of one, of the end of another, of what is between."""
    folder = shutil.copytree(text_shards, tmp_path / "set")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [path for path in files if path.name != ".made_by.json"]  # no part of the data
    assert {path.parent.name for path in files} == {"set", "train", "validation"}
    for number, path in enumerate(file for file in files if file.stat().st_size):
        data = path.read_bytes()
        damaged = bytearray(data)
        damaged[(len(data) - 1) * (number % 5) // 4] ^= 1 << number % 8
        path.write_bytes(damaged)
        ended = call(shards.main, "verify", folder, expect=1)
        assert str(path) in ended.stdout + ended.stderr
        path.write_bytes(data)
    call(shards.main, "verify", folder)


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
