"""`shards shuffle`: every row once, anywhere with equal chance, whatever happens on the way."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import files_of
from data_sets import VOCABULARY_SIZE, random_rows, rows_of_ids, write_rows
from hypothesis import given
from hypothesis import strategies as st
from places import FORMAT_1

from tokenfeed.pipeline.errors import ConfigError, ManifestError, ShardFormatError
from tokenfeed.pipeline.format.manifest import Manifest, ShardInfo, Shuffled, SplitInfo
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.schema import task_columns
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.tools.shuffling import run
from tokenfeed.tools.shuffling.command import ShuffleRows
from tokenfeed.tools.shuffling.layout import Layout
from tokenfeed.tools.shuffling.permutation import Permutation
from tokenfeed.tools.shuffling.run import Settings, shuffle_dataset
from tokenfeed.tools.shuffling.unit import PARTITIONS

GOLDEN = FORMAT_1 / "lm"


MakeDataset = Callable[..., Path]


def shuffle(source: Path, out: Path, **settings: Any) -> Path:
    shuffle_dataset(source, out, Settings(**{"seed": 0, "workers": 1} | settings))
    return out


def rows_of(folder: Path, split: str = "train") -> Rows:
    manifest = Manifest.read(folder)
    readers = [(ShardReader.open(folder, manifest, s), s) for s in manifest.split(split).shards]
    return Rows.concatenate(
        [reader.read(index)[0] for reader, shard in readers for index in range(shard.batches)]
    )


def listed(rows: Rows) -> list[tuple[Any, ...]]:
    """A tuple of all its values for each row."""
    ends = np.cumsum(rows.lengths)[:-1]
    columns = [[part.tobytes() for part in np.split(v, ends)] for v in rows.per_token.values()]
    columns += [values.tolist() for values in rows.per_row.values()]
    return list(zip(*columns, strict=True))


def lengths_of(count: int, mean: float = 30, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).exponential(mean, count).astype(np.int64)
    return np.maximum(1, drawn)


def manifest_of(rows: int, tokens: int, shards: int, batches: int) -> Manifest:
    """A manifest of a data set that need not exist."""
    info = ShardInfo(
        file="train/0.arrow",
        bytes=1,
        xxh3="0",
        rows=rows,
        tokens=tokens,
        batches=batches,
        longest_row=1,
    )
    others = dataclasses.replace(info, rows=0, tokens=0, batches=0)
    split = SplitInfo(shards=(info, *[others] * (shards - 1)), length_histogram=())
    return dataclasses.replace(Manifest.read(GOLDEN), splits={"train": split})


@given(
    rows=st.integers(1, 3000),
    mean=st.integers(1, 500),
    shards=st.integers(1, 40),
    memory=st.integers(20_000, 10**7),
)
def test_every_row_has_one_place_and_every_place_one_shard_and_bucket(
    rows: int, mean: int, shards: int, memory: int
) -> None:
    batches = min(rows, max(shards, rows // 7))
    manifest = manifest_of(rows, rows * mean, shards, batches)
    layout = Layout.from_manifest(manifest, seed=1, shard_bytes=None, memory_bytes=memory)
    split = layout.splits["train"]
    assert sorted(split.permutation.places(np.arange(rows)).tolist()) == list(range(rows))
    per_shard = np.diff(split.shard_edges)
    assert per_shard.sum() == rows
    assert per_shard.max() - per_shard.min() <= 1
    assert per_shard.min() >= 1
    edges = split.bucket_edges
    assert (edges[0], edges[-1]) == (0, rows)
    assert np.all(np.diff(edges) >= 0)
    assert len(edges) == split.num_groups * split.buckets_a_group + 1
    of_groups = edges[:: split.buckets_a_group]
    assert np.array_equal(of_groups, split.shard_edges[split.group_edges])
    covered = [batch for unit in layout.scatters for batch in range(unit.start, unit.stop)]
    assert covered == list(range(batches))
    numbers = [unit.number for unit in (*layout.scatters, *layout.gathers)]
    assert numbers == list(range(len(numbers)))


@given(size=st.integers(1, 10**6), key=st.integers(0, 2**64 - 1), data=st.data())
def test_a_row_has_its_place_whichever_rows_are_asked_for_beside_it(
    size: int, key: int, data: st.DataObject
) -> None:
    permutation = Permutation(size=size, key=key)
    start = data.draw(st.integers(0, permutation.size - 1))
    numbers = np.arange(start, min(start + 40_000, permutation.size))
    places = permutation.places(numbers)
    assert len(np.unique(places)) == len(numbers)
    assert (places.min() >= 0) & (places.max() < permutation.size)
    one = data.draw(st.integers(0, len(numbers) - 1))
    assert permutation.places(numbers[one : one + 1]) == places[one : one + 1]


@pytest.mark.parametrize("gigabytes", [1, 30, 1000])
def test_as_many_workers_run_as_find_room_in_the_memory(gigabytes: int) -> None:
    manifest = manifest_of(10**6 * gigabytes, 5 * 10**8 * gigabytes, 64 * gigabytes, 10**4)
    for memory in (2 * 10**8, 10**9, 10**11):
        layout = Layout.from_manifest(manifest, seed=0, shard_bytes=None, memory_bytes=memory)
        workers = layout.workers(10**6, memory)
        assert workers >= 2
        assert workers * layout.bucket_bytes * 2 <= memory
        assert layout.workers(2, memory) == 2


@pytest.mark.parametrize(
    ("task", "pairs"),
    [
        ("lm", False),
        ("classify", False),
        ("score", True),
        ("classify", True),
        ("tag", False),
        ("complete", False),
    ],
)
def test_every_row_is_there_once_with_all_its_columns(
    make_dataset: MakeDataset, tmp_path: Path, task: str, pairs: bool
) -> None:
    source = make_dataset(lengths_of(3000), 3, task=task, pairs=pairs)
    out = shuffle(source, tmp_path / "out", memory_bytes=100_000)
    before, after = listed(rows_of(source)), listed(rows_of(out))
    assert before != after
    assert sorted(before) == sorted(after)
    assert rows_of(out).per_row.keys() == rows_of(source).per_row.keys()


@pytest.mark.parametrize("vocabulary_size", [1000, 1 << 16, 1 << 17])
def test_rows_stand_where_the_permutation_puts_them(tmp_path: Path, vocabulary_size: int) -> None:
    rows = random_rows(lengths_of(2000, seed=5), vocabulary_size=vocabulary_size)
    source = write_rows(tmp_path / "in", {"train": rows}, vocabulary_size, 3)
    layout = Layout.from_manifest(
        Manifest.read(source), seed=7, shard_bytes=None, memory_bytes=10**6
    )
    places = layout.splits["train"].permutation.places(np.arange(2000)).tolist()
    out = shuffle(source, tmp_path / "out", seed=7)
    before, after = listed(rows), listed(rows_of(out))
    assert all(after[place] == before[number] for number, place in enumerate(places))


def test_compressed_partitions_make_the_same_bytes_and_take_less_room(
    make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_dataset(np.full(2000, 300), 2)
    monkeypatch.setattr(run, "clear_away", lambda out: None)
    sizes, files = [], []
    for room in (1, 10**18):
        monkeypatch.setattr(run, "_ROOM", room)
        out = shuffle(source, tmp_path / f"{room}")
        sizes.append(sum(path.stat().st_size for path in (out / PARTITIONS).iterdir()))
        shutil.rmtree(out / PARTITIONS)
        files.append(files_of(out))
    assert files[0] == files[1]
    assert sizes[1] < sizes[0]


def test_a_folder_that_cannot_be_made_is_named_with_a_remedy(make_dataset: MakeDataset) -> None:
    with pytest.raises(ConfigError, match="/proc/out: cannot be made"):
        shuffle(make_dataset([1]), Path("/proc/out"))


def test_another_seed_is_another_order_and_the_same_seed_the_same(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    source = make_dataset(lengths_of(500))
    orders = {
        tuple(rows_of(shuffle(source, tmp_path / f"{seed}", seed=seed)).per_row["origin_record"])
        for seed in range(4)
    }
    assert len(orders) == 4


def test_rows_go_anywhere_with_equal_chance(tmp_path: Path) -> None:
    """Mean displacement of a uniform permutation is a third; of a table of where the rows of each
    part went, chi-square is about its degrees of freedom."""
    count, parts = 60_000, 20
    source = write_rows(
        tmp_path / "in",
        {"train": rows_of_ids(np.ones(count), np.ones(count, np.int64), VOCABULARY_SIZE)},
        VOCABULARY_SIZE,
        6,
    )
    for seed in range(3):
        out = shuffle(source, tmp_path / f"{seed}", seed=seed, memory_bytes=10**6)
        origin = rows_of(out).per_row["origin_record"].astype(np.int64)
        displacement = np.abs(origin - np.arange(count)).mean() / count
        assert abs(displacement - 1 / 3) < 0.005
        assert abs(np.corrcoef(origin[:-1], origin[1:])[0, 1]) < 0.02
        table = np.zeros((parts, parts))
        np.add.at(table, (np.arange(count) * parts // count, origin * parts // count), 1)
        expected = count / parts**2
        chi_square = ((table - expected) ** 2 / expected).sum()
        assert chi_square < 361 + 5 * np.sqrt(2 * 361)


def test_every_split_is_shuffled_for_itself_and_provenance_is_kept(tmp_path: Path) -> None:
    rows = random_rows(lengths_of(900))
    splits = {
        "test": rows.slice(0, 1),
        "train": rows.slice(1, 700),
        "validation": rows.slice(700, 900),
    }
    source = write_rows(
        tmp_path / "in",
        {**splits, "empty": rows.slice(0, 0)},
        VOCABULARY_SIZE,
        4,
        task="classify",
        columns=(),
        label_names=("a", "b"),
        tokenizer=b"{}",
    )
    out = shuffle(source, tmp_path / "out", seed=9)
    for split, before in splits.items():
        assert sorted(listed(rows_of(out, split))) == sorted(listed(before))
    was, manifest = Manifest.read(source), Manifest.read(out)
    assert manifest.split("empty") == was.split("empty")
    assert manifest.shuffled == Shuffled(seed=9, source=was.fingerprint)
    restored = dataclasses.replace(manifest, splits=was.splits, shuffled=None)
    assert restored == was
    for split in splits:
        assert manifest.split(split).length_histogram == was.split(split).length_histogram
        assert len(manifest.split(split).shards) == len(was.split(split).shards)
    assert (out / "tokenizer").read_bytes() == b"{}"


@pytest.mark.parametrize("lengths", [[1], [1, 2], [300_000], [1, 400_000, 3, 140_000, 1]])
def test_tiny_sets_and_rows_beyond_the_limits_are_shuffled_too(
    make_dataset: MakeDataset, tmp_path: Path, lengths: list[int]
) -> None:
    source = make_dataset(lengths, 1)
    out = shuffle(source, tmp_path / "out", memory_bytes=1000)
    assert sorted(listed(rows_of(out))) == sorted(listed(rows_of(source)))


def test_a_shuffled_set_can_be_shuffled_again(make_dataset: MakeDataset, tmp_path: Path) -> None:
    source = make_dataset(lengths_of(300))
    first = shuffle(source, tmp_path / "first")
    second = shuffle(first, tmp_path / "second")
    assert sorted(listed(rows_of(second))) == sorted(listed(rows_of(source)))
    assert listed(rows_of(second)) != listed(rows_of(first))


def test_the_shard_size_decides_how_many_shards_there_are(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    source = make_dataset(lengths_of(15), 4)
    manifest = Manifest.read(source)
    ledger = dataclasses.replace(manifest.ledger, bytes=120_000)
    dataclasses.replace(manifest, ledger=ledger).write(source)
    for size, shards in ((None, 4), (10_000, 12), (10**9, 1), (1, 15)):
        out = shuffle(source, tmp_path / f"{size}", shard_bytes=size)
        rows = [shard.rows for shard in Manifest.read(out).split("train").shards]
        assert len(rows) == shards
        assert max(rows) - min(rows) <= 1


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"memory": "0"}, "`--memory` 0: expected a size like 256MB."),
        ({"memory": "some"}, "`--memory` 'some': expected a size like 256MB."),
        ({"shard_size": "0"}, "`--shard-size` 0: expected a size like 256MB, or auto."),
        ({"workers": 0}, "`--workers` 0: expected at least 1, or auto."),
    ],
)
def test_an_option_that_cannot_work_is_refused(
    tmp_path: Path, make_dataset: MakeDataset, option: dict[str, Any], said: str
) -> None:
    wanted = ShuffleRows(source=make_dataset([1]), out=tmp_path / "out", **option)
    with pytest.raises(ConfigError, match=re.escape(said)):
        wanted.run()


def test_a_damaged_side_file_is_named(make_dataset: MakeDataset, tmp_path: Path) -> None:
    source = make_dataset(lengths_of(30))
    (source / "tokenizer").write_bytes(b"other")
    with pytest.raises(ManifestError, match="tokenizer: is not the file"):
        shuffle(source, tmp_path / "out")
    (source / "tokenizer").unlink()
    with pytest.raises(ManifestError, match="tokenizer: is missing"):
        shuffle(source, tmp_path / "out")


def test_a_partition_damaged_while_it_is_needed_is_named(
    make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = make_dataset(lengths_of(3000), 3), tmp_path / "out"
    finished = run._Run.finish

    def damage(self: run._Run) -> float:
        written = run.is_as_written
        partition = out / PARTITIONS / "00000"
        gathers, self._gathers = self._gathers, []
        finished(self)
        assert written
        partition.write_bytes(partition.read_bytes()[:100] + b"?" + partition.read_bytes()[101:])
        self._scatters, self._gathers = [], gathers
        return finished(self)

    monkeypatch.setattr(run._Run, "finish", damage)
    with pytest.raises(ShardFormatError, match="00000: this temporary file is damaged"):
        shuffle(source, out)
    monkeypatch.undo()
    shuffle(source, out)
    assert files_of(out) == files_of(shuffle(source, tmp_path / "expected"))


def test_fingerprints_of_before_stay_and_the_key_is_there_only_where_rows_were_shuffled(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    stored = json.loads((GOLDEN / "manifest.json").read_text())
    assert Manifest.read(GOLDEN).fingerprint == stored["manifest_xxh3"]
    source = make_dataset(lengths_of(30))
    assert "shuffled" not in json.loads((source / "manifest.json").read_text())
    out = shuffle(source, tmp_path / "out", seed=4)
    written = json.loads((out / "manifest.json").read_text())["shuffled"]
    assert written == {"seed": 4, "source": Manifest.read(source).fingerprint}


def test_the_columns_of_a_task_come_in_any_width(tmp_path: Path) -> None:
    columns = task_columns("tag", pairs=True)  # uint8 before int16
    rows = random_rows(lengths_of(501, mean=7), "tag", pairs=True)
    source = write_rows(tmp_path / "in", {"train": rows}, VOCABULARY_SIZE, 2, columns=columns)
    out = shuffle(source, tmp_path / "out", memory_bytes=10_000)
    assert sorted(listed(rows_of(out))) == sorted(listed(rows))
