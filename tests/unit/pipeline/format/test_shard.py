"""Shards come back as written, read in other tools, and never give wrong tokens."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import write_rows

from tokenfeed import Manifest, Padded, ShardLoader
from tokenfeed.pipeline.errors import ConfigError, LoaderError, ShardFormatError
from tokenfeed.pipeline.format.manifest import ShardInfo
from tokenfeed.pipeline.format.schema import Rows
from tokenfeed.pipeline.format.shard import ExpectedShard, ShardReader
from tokenfeed.pipeline.format.shard_ranges import RangedShard
from tokenfeed.pipeline.format.shard_writer import ShardWriter

NAME = "train/00000.arrow"


def rows_of(lengths: list[int], vocabulary_size: int = 1000) -> Rows:
    """Rows with counting ids; the record number is the row number."""
    lengths_array = np.array(lengths, np.int64)
    count = len(lengths)
    ids = np.arange(lengths_array.sum()) % vocabulary_size
    return Rows(
        lengths_array,
        {"input_ids": ids.astype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)},
        {
            "origin_file": np.arange(count, dtype=np.uint32) % 3,
            "origin_record": np.arange(count, dtype=np.uint64),
        },
    )


def write(folder: Path, rows: Rows, vocabulary_size: int = 1000, pieces: int = 1) -> ShardInfo:
    with ShardWriter(folder, NAME, vocabulary_size) as writer:
        edges = np.linspace(0, len(rows), pieces + 1).astype(int)
        for start, stop in pairwise(edges):
            writer.append(rows.slice(start, stop))
    assert writer.info is not None
    return writer.info


def read_all(folder: Path, info: ShardInfo, vocabulary_size: int = 1000) -> Rows:
    reader = ShardReader(folder, info, vocabulary_size)
    return Rows.concatenate([reader.read(batch)[0] for batch in range(info.batches)])


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=300),
    vocabulary_size=st.sampled_from([7, 65_536, 65_537, 200_000]),
)
def test_rows_come_back_as_written(
    tmp_path: Path, lengths: list[int], vocabulary_size: int
) -> None:
    rows = rows_of(lengths, vocabulary_size)
    info = write(tmp_path, rows, vocabulary_size)
    back = read_all(tmp_path, info, vocabulary_size)
    assert np.array_equal(back.lengths, rows.lengths)
    for name, values in (rows.per_token | rows.per_row).items():
        assert np.array_equal((back.per_token | back.per_row)[name], values), name
    assert back.ids.dtype == (np.uint16 if vocabulary_size <= 65_536 else np.uint32)
    assert (info.rows, info.tokens, info.longest_row) == (len(rows), sum(lengths), max(lengths))


def test_pandas_polars_and_datasets_open_a_shard(tmp_path: Path) -> None:
    info = write(tmp_path, rows_of([3, 1, 2]))
    path = str(tmp_path / info.file)
    expected = [[0, 1, 2], [3], [4, 5]]
    assert [row.tolist() for row in pd.read_feather(path)["input_ids"]] == expected
    import polars  # a fifth of a second

    assert polars.read_ipc(path)["input_ids"].to_list() == expected
    loaded = datasets.load_dataset(
        "arrow", data_files=path, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded["input_ids"][:] == expected


def test_an_error_while_writing_leaves_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="token id 999 does not fit a vocabulary of 500"),
        ShardWriter(tmp_path, NAME, 500) as writer,
    ):
        writer.append(rows_of([999, 1], 1000))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_shard_of_another_name_or_vocabulary_is_refused(tmp_path: Path) -> None:
    info = write(tmp_path, rows_of([5] * 10))
    other = tmp_path / "train/00001.arrow"
    other.write_bytes((tmp_path / NAME).read_bytes())
    with pytest.raises(ShardFormatError, match=r"00001\.arrow: its schema"):
        ShardReader(tmp_path, replace(info, file="train/00001.arrow"), 1000)
    with pytest.raises(ShardFormatError, match="its schema"):
        ShardReader(tmp_path, info, 1001)


def test_a_footer_that_points_at_another_batch_is_caught(tmp_path: Path) -> None:
    """Each batch is whole, so only the place inside the checksum tells them apart."""
    info = write(tmp_path, rows_of([4096] * 48))
    path = tmp_path / NAME
    data = path.read_bytes()
    footer_start = len(data) - 10 - int.from_bytes(data[-10:-6], "little")
    reader = ShardReader(tmp_path, info, 1000)
    assert info.batches == 3
    del reader
    blocks = _block_positions(data, footer_start)
    swapped = bytearray(data)
    swapped[blocks[0] : blocks[0] + 24], swapped[blocks[1] : blocks[1] + 24] = (
        data[blocks[1] : blocks[1] + 24],
        data[blocks[0] : blocks[0] + 24],
    )
    path.write_bytes(swapped)
    with pytest.raises(ShardFormatError, match="record batch 0 fails its checksum"):
        ShardReader(tmp_path, info, 1000).read(0)


def _block_positions(data: bytes, footer_start: int) -> list[int]:
    """Where the footer keeps its 24-byte blocks: each begins with a message's offset."""
    marker = b"\xff\xff\xff\xff"
    offsets = [at for at in range(0, footer_start, 8) if data[at : at + 4] == marker]
    found = []
    for offset in offsets:
        at = data.find(offset.to_bytes(8, "little"), footer_start)
        if offset > 8 and at >= 0:
            found.append(at)
    return found


def _read_both_ways(folder: Path, info: ShardInfo) -> list[str]:
    """The errors of reading a shard as a file, and by ranges as from a store."""
    data = (folder / info.file).read_bytes()
    expected = ExpectedShard.of(info.file, info, 1000, (), None)
    ranged = RangedShard.from_end(expected, data)
    errors = []
    for number in range(info.batches):
        start, length = ranged.span(number, 1)
        for read in (
            lambda number: ShardReader(folder, info, 1000).read(number),
            lambda number, part=data[start : start + length]: ranged.rows(number, part),
        ):
            try:
                read(number)
            except ShardFormatError as error:
                errors.append(str(error))
    assert not any("\n" in error for error in errors)
    return errors


def test_shard_beyond_manifest_is_refused_before_decompression(tmp_path: Path) -> None:
    """A shard of a few kB that would take 10 MB."""
    rows = rows_of([5_000_000])
    rows.ids[:] = 0
    info = write(tmp_path, rows)
    assert info.bytes < 10_000
    assert not _read_both_ways(tmp_path, info)
    errors = _read_both_ways(tmp_path, replace(info, tokens=100, longest_row=100))
    assert len(errors) == 2
    for error in errors:
        assert "record batch 0 cannot be decoded (it would take 10,0" in error


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"rows": 2000}, 1),
        ({"rows": 600}, 2),
        ({"tokens": 60_000}, 2),
        ({"longest_row": 299}, 3),
    ],
)
def test_record_batch_unlike_manifest_is_refused(
    tmp_path: Path, change: dict[str, int], count: int
) -> None:
    info = write(tmp_path, rows_of([100, 200, 300] * 300))
    assert info.batches == 3
    assert not _read_both_ways(tmp_path, info)
    errors = _read_both_ways(tmp_path, replace(info, **change))
    assert len(errors) == 2 * count
    assert all("the manifest allows" in error for error in errors)


def test_loader_of_shards_unlike_manifest_blames_the_shards(tmp_path: Path) -> None:
    """Two record batches have fewer tokens than the manifest says. No batch alone shows this."""
    folder = write_rows(tmp_path / "set", {"train": rows_of([100] * 1000)}, 1000)
    manifest = Manifest.read(folder)
    (shard,) = manifest.split("train").shards
    split = replace(manifest.split("train"), shards=(replace(shard, tokens=100_007),))
    replace(manifest, splits={"train": split}).write(folder)
    assert shard.batches == 2
    with (
        ShardLoader(folder, batching=Padded(4096), num_workers=0, epochs=1) as loader,
        pytest.raises(LoaderError, match=r"shards are not those of the manifest.*shards verify"),
    ):
        for _ in loader:
            pass
