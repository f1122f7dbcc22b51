"""What comes by ranges and through a cache is what the folder has, come what may to the cache."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_sets import (
    MakeDataset,
    order_of_one,
    plan_in_memory,
    random_rows,
)
from support.delivery import flip_bit, realistic_lengths, small_batches
from support.processes import eventually
from support.stores import RangedFolder, cached_files

from tokenfeed import Fixed
from tokenfeed.pipeline.caching.node_cache import CacheSettings, cache_for
from tokenfeed.pipeline.errors import ShardFormatError
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.pipeline.planning.plan import Ahead, Position
from tokenfeed.pipeline.windows.reader import Window, WindowReader

PLENTY = 1 << 30


@pytest.fixture
def folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return make_dataset(realistic_lengths(), num_shards=3)


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> RangedFolder:
    return RangedFolder(folder, tmp_path / "requests")


@pytest.fixture
def cache(tmp_path: Path) -> CacheSettings:
    (tmp_path / "cache" / "v2").mkdir(parents=True)
    return CacheSettings(str(tmp_path / "cache" / "v2"), PLENTY, is_whole=False, windows_ahead=1)


def reader_of(path: StorePath, cache: CacheSettings | None = None) -> WindowReader:
    return WindowReader(open_splits([path], "train"), cache=cache)


def all_batches(folder: Path) -> np.ndarray:
    (split,) = open_splits([folder], "train")
    return np.arange(split.batches)


def same(one: Window, other: Window) -> bool:
    return bool(
        (one.numbers == other.numbers).all()
        and (one.rows.ids == other.rows.ids).all()
        and (one.rows.lengths == other.rows.lengths).all()
    )


@pytest.mark.parametrize("kept", [False, True])
def test_ranges_give_what_files_give(
    folder: Path, store: RangedFolder, cache: CacheSettings, kept: bool
) -> None:
    batches = np.random.default_rng(0).permutation(all_batches(folder))
    reader = reader_of(store, cache if kept else None)
    local = reader_of(folder)
    for part in np.array_split(batches, 4):
        assert same(reader.read(part), local.read(part))


def test_a_record_batch_is_one_request_and_a_shard_one_more(
    folder: Path, store: RangedFolder, cache: CacheSettings
) -> None:
    batches = all_batches(folder)
    reader = reader_of(store, cache)
    reader.read(batches)
    reader_of(store, cache).read(batches)
    assert len(store.requests()) == len(set(store.requests())) == len(batches) + 3
    fetched = reader.fetched
    assert fetched
    assert fetched.requests == len(batches) + 3


@dataclass(frozen=True)
class FetchingFolder(RangedFolder):
    """One that notes which files it is told to bring."""

    def fetch(self, name: str) -> None:
        self._note(f"{name} 0 0\n")


def test_what_a_store_keeps_itself_is_not_kept_again_and_is_brought_ahead(
    folder: Path, tmp_path: Path, cache: CacheSettings
) -> None:
    store = FetchingFolder(folder, tmp_path / "requests")
    (split,) = open_splits([store], "train")
    order = order_of_one(split.batches, 8, seed=0, shuffle=True)
    plan, _ = plan_in_memory([random_rows(np.array([3]))], Fixed(1))
    ahead = Ahead(replace(plan, order=order), Position(0, 0, 0))
    reader, local = reader_of(store, cache), reader_of(folder)
    assert same(reader.read(order.window(0, 0), ahead), local.read(order.window(0, 0)))
    ends = np.cumsum([info.batches for info in split.split.shards])
    coming = set(np.searchsorted(ends, order.window(0, 1), "right").tolist())
    wanted = {f"{split.split.shards[shard].file} 0 0" for shard in coming}
    assert eventually(lambda: wanted <= set(store.requests()))
    assert not list(Path(cache.folder).glob("*/*/*")), "the store has it"
    assert cache_for((split,), ahead.plan, tmp_path, 1), "nothing is refused for its size"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path) -> None:
    flip_bit(path, path.stat().st_size // 2)


@settings(max_examples=12)
@given(st.lists(st.sampled_from([cut, empty, zero, flip]), min_size=1, max_size=6), st.booleans())
def test_a_damaged_file_of_the_cache_is_fetched_again(
    folder: Path,
    store: RangedFolder,
    cache: CacheSettings,
    damages: list[Callable[[Path], None]],
    footers: bool,
) -> None:
    batches = all_batches(folder)
    whole = reader_of(store, cache).read(batches)
    files = cached_files(Path(cache.folder).parent, footers=footers)
    for damage, path in zip(damages, files, strict=False):
        damage(path)
    asked = len(store.requests())
    reader = reader_of(store, cache)
    assert same(reader.read(batches), whole)
    again = len(store.requests()) - asked
    assert reader.fetched
    assert reader.fetched.damaged == again
    if flip in damages:  # which may hit what nobody reads
        assert again <= len(damages)
    else:
        assert again == min(len(damages), len(files))
    assert reader_of(store, cache).read(batches)
    assert len(store.requests()) == asked + again, "what was fetched again is whole in the cache"


def test_a_damaged_cache_is_told_of(
    folder: Path, store: RangedFolder, cache: CacheSettings, caplog: pytest.LogCaptureFixture
) -> None:
    batches = all_batches(folder)
    reader_of(store, cache).read(batches)
    cut(sorted(cached_files(Path(cache.folder).parent))[0])
    with caplog.at_level(logging.WARNING):
        reader_of(store, cache).read(batches)
    assert "ranged://set1/train/00000.arrow: record batch 0 was damaged in the cache" in caplog.text


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("at", [0.4, 0.999])
def test_a_damaged_object_is_named(
    folder: Path, store: RangedFolder, cache: CacheSettings, kept: bool, at: float
) -> None:
    shard = folder / "train/00001.arrow"
    flip_bit(shard, int(shard.stat().st_size * at) - 20)
    reader = reader_of(store, cache if kept else None)
    with pytest.raises(ShardFormatError, match=r"^ranged://set1/train/00001.arrow: .*Copy"):
        reader.read(all_batches(folder))


def test_a_missing_or_shorter_object_is_named(
    folder: Path, store: RangedFolder, cache: CacheSettings
) -> None:
    shard = folder / "train/00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ShardFormatError, match=r"00000.arrow"):
        reader_of(store, cache).read(all_batches(folder))
    shard.unlink()
    with pytest.raises(ShardFormatError, match=r"00000.arrow: not found, but the manifest names"):
        reader_of(store, cache).read(all_batches(folder))
