"""The cache holds no more than its bound, keeps what it has, and never costs a run."""

import errno
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.data_sets import MakeDataset
from support.delivery import realistic_lengths, small_batches
from support.processes import eventually
from support.stores import RangedFolder, cached_files

from tokenfeed import Fixed
from tokenfeed.pipeline.caching import node_cache
from tokenfeed.pipeline.caching.node_cache import (
    KEPT,
    PASSING,
    Budget,
    CacheSet,
    CacheSettings,
    NodeCache,
    resolve_cache,
    sweep,
)
from tokenfeed.pipeline.errors import ConfigError, RemoteError
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.format.shard import end_bytes
from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.reader import WindowReader

SIZES: dict[str, Any] = {"total_bytes": 100_000_000, "window_bytes": 1_000_000}
"""Of the data that is read through the cache."""


@pytest.fixture
def store(
    make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> RangedFolder:
    small_batches(monkeypatch)
    return RangedFolder(make_dataset(realistic_lengths(2000)), tmp_path / "requests")


def maker_of(store: RangedFolder, cache: CacheSettings | None) -> WindowMaker:
    sources = open_splits([store], "train")
    settings: dict[str, Any] = {"split": "train", "seed": 0, "shuffle": True}
    plan = Plan.from_splits(
        sources, store, Fixed(4), micro_batches_per_step=1, window_tokens=5_000, **settings
    )
    return WindowMaker(plan, WindowReader(sources, cache=cache), 0, 1)


def settings_of(folder: Path, bound: int, *, is_whole: bool = False) -> CacheSettings:
    (folder / "v2").mkdir(parents=True, exist_ok=True)
    return CacheSettings(str(folder / "v2"), bound, is_whole, windows_ahead=1)


def epochs(maker: WindowMaker, count: int = 2) -> None:
    for epoch in range(count):
        for window in range(maker.plan.num_windows):
            maker.make(Position(epoch, window, 0))


def wait_for(window: int, maker: WindowMaker, folder: Path) -> None:
    """Wait until a cache has the record batches of a window."""
    wanted = set(maker.plan.order.window(0, window).tolist())
    assert eventually(lambda: wanted <= {int(path.name, 16) for path in cached_files(folder)})


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [1, 60])
def test_a_cache_never_holds_more_than_its_bound(
    make_dataset: MakeDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_shards: int,
) -> None:
    small_batches(monkeypatch)
    folder = make_dataset(realistic_lengths(1000), num_shards=num_shards)
    store = RangedFolder(folder, tmp_path / "requests")
    (split,) = open_splits([folder], "train")
    total = sum(shard.bytes for shard in split.split.shards)
    bound, most = total // 2, 0
    if num_shards > 1:
        assert sum(map(end_bytes, split.split.shards)) > bound, "footers exclusive are more"
    rename = os.replace

    def watched(source: str, target: str) -> None:
        nonlocal most
        rename(source, target)
        found = cached_files(tmp_path) + cached_files(tmp_path, footers=True)
        most = max(most, sum(p.stat().st_size for p in found if p.exists()))

    monkeypatch.setattr("tokenfeed.pipeline.caching.node_cache.os.replace", watched)
    epochs(maker_of(store, settings_of(tmp_path, bound)))
    assert 0.7 * bound < most <= bound


def write_pieces(folder: Path, count: int = 20) -> None:
    """Files of 100 bytes, the last one written first, and a footer that is older."""
    (folder / "ends").mkdir(parents=True)
    (folder / "ends/0").write_bytes(bytes(70))
    os.utime(folder / "ends/0", (1, 1))
    for number in range(count):
        path = folder / f"{number:02x}" / f"{number:x}"
        path.parent.mkdir()
        path.write_bytes(bytes(100))
        os.utime(path, (1000 - number, 1000 - number))


def test_what_is_kept_goes_only_with_its_run(tmp_path: Path) -> None:
    for name in ("own", "left"):
        write_pieces(tmp_path / KEPT / name)
        (tmp_path / KEPT / name / ".used").touch()
    assert sweep(str(tmp_path), KEPT, 0) == 2 * 2070, "both are read"
    os.utime(tmp_path / KEPT / "left/.used", (time.time() - 10_000,) * 2)
    assert sweep(str(tmp_path), KEPT, 3000) == 2070 + 900, "no more than must be"
    assert sweep(str(tmp_path), KEPT, 0) == 2070


def test_a_cache_serves_the_share_that_it_keeps(store: RangedFolder, tmp_path: Path) -> None:
    """As many reads as the share of the data that fits, from the second epoch on. No rule of
    eviction has more, because an epoch reads every record batch once."""
    (split,) = open_splits([store], "train")
    total = sum(path.stat().st_size for path in store.folder.glob("train/*"))
    share = 0.5
    settings = settings_of(tmp_path, int(total * (share + 0.1)))
    maker = maker_of(store, replace(settings, passing_bytes=int(total * 0.1)))
    epochs(maker, 1)
    before = len(store.requests())
    epochs(maker, 4)
    served = 1 - (len(store.requests()) - before) / (4 * split.batches)
    assert served > share - 0.06


def test_the_split_that_fits_comes_in_few_large_requests(
    store: RangedFolder, tmp_path: Path
) -> None:
    maker = maker_of(store, settings_of(tmp_path, 1 << 30, is_whole=True))
    first_window = maker.plan.order.window(0, 0)
    for window in range(3):
        maker.make(Position(0, window, 0))
        wait_for(window + 1, maker, tmp_path)
    (split,) = open_splits([store], "train")
    assert eventually(lambda: len(cached_files(tmp_path)) == split.batches)
    asked = store.requests()
    assert len(asked) == len(first_window) + 2 + 2, "two shards, their ends first"
    epochs(maker, 1)
    assert store.requests() == asked


def test_an_outage_costs_nothing_as_long_as_windows_are_ahead(
    store: RangedFolder, tmp_path: Path
) -> None:
    maker = maker_of(store, replace(settings_of(tmp_path, 1 << 30), windows_ahead=5))
    maker.make(Position(0, 0, 0))
    for window in range(1, 6):
        wait_for(window, maker, tmp_path)
    (store.folder / "broken").touch()
    for window in range(1, 6):
        maker.make(Position(0, window, 0))
    with pytest.raises(RemoteError, match="broken for a test"):
        epochs(maker, 1)
    (store.folder / "broken").unlink()
    epochs(maker, 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_takes_nothing_costs_the_cache_and_not_the_run(
    store: RangedFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    def refuse(path: str, data: bytes) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data[: len(data) // 2])
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(node_cache, "_write", refuse)
    maker = maker_of(store, settings_of(tmp_path, 1 << 30))
    local = maker_of(store, None)
    with caplog.at_level(logging.WARNING):
        for window in range(3):
            position = Position(0, window, 0)
            made, expected = maker.make(position), local.make(position)
            assert (made.columns["input_ids"] == expected.columns["input_ids"]).all()
    assert caplog.text.count("the cache cannot be written") == 1
    assert not cached_files(tmp_path)
    assert not [path for path in tmp_path.glob("v2/*/*/*/*") if path.is_file()]


def test_a_bound_below_three_windows_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`cache_bytes`=2999999: 3 windows .* 3,000,000 bytes"):
        resolve_cache(tmp_path, 2_999_999, **SIZES)
    assert resolve_cache(tmp_path, 3_000_000, **SIZES)
    assert resolve_cache(tmp_path, 10, total_bytes=10, window_bytes=10)
    with pytest.raises(ConfigError, match=r"`cache_bytes`=-1: expected a whole number"):
        resolve_cache(tmp_path, -1, **SIZES)


def test_a_bound_above_what_the_disk_has_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has [\d,]+ bytes free, and the cache would use 1,[0,]+"
    ):
        resolve_cache(tmp_path, 10**18, total_bytes=10**18, window_bytes=10)


def test_memory_exclusive_is_what_zero_asks_for(tmp_path: Path) -> None:
    assert resolve_cache(tmp_path / "cache", 0, **SIZES) is None
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_is_no_reason_to_stop_a_run_that_asked_for_no_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_cache(tmp_path, None, total_bytes=10**18, window_bytes=10**17) is None
    assert "too few for a cache of" in caplog.text


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENFEED_CACHE", str(tmp_path / "there"))
    found = resolve_cache(None, None, **SIZES)
    assert found
    assert found.folder == str(tmp_path / "there/v2")
    monkeypatch.delenv("TOKENFEED_CACHE")
    monkeypatch.setattr(node_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    found = resolve_cache(None, None, **SIZES)
    assert found
    assert found.folder == str(tmp_path / f"tokenfeed-{os.getuid()}/v2")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"`cache_dir`=.*/file/x: Not a directory"):
        resolve_cache(tmp_path / "file/x", None, **SIZES)
    with pytest.raises(ConfigError, match="`cache_dir`=5: expected a folder, or None"):
        resolve_cache(5, None, **SIZES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "stored", [b"", b"xx", b"\xff" * 8, b"\xff" * 7 + b"\x7f", bytes(7) + b"\x80"]
)
def test_a_sum_that_is_lost_or_damaged_is_counted_anew(tmp_path: Path, stored: bytes) -> None:
    cache = settings_of(tmp_path, 1000)
    files = CacheSet(NodeCache(replace(cache, passing_bytes=0)), "set")
    for number in range(8):
        files.cache.write(files.batch(number), bytes(100))
    (tmp_path / "v2/kept/.bytes").write_bytes(stored)
    assert Budget(f"{cache.folder}/{KEPT}").read() == 0
    for number, there in enumerate((900, 1000, 1000, 1000), start=8):
        files.cache.write(files.batch(number), bytes(100))
        assert Budget(f"{cache.folder}/{KEPT}").read() == there == 100 * len(cached_files(tmp_path))


def test_a_sweep_leaves_what_is_not_of_the_cache(tmp_path: Path) -> None:
    (tmp_path / "elsewhere/00").mkdir(parents=True)
    (tmp_path / "elsewhere/00/0").write_bytes(bytes(100))
    cache = tmp_path / "cache" / PASSING
    foreign = [
        cache / "set/00/README",
        cache / "set/00/1",
        cache / "other/zz/1",
        cache / "set/00/0x0",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
    (cache / "link").symlink_to(tmp_path / "elsewhere")
    (cache / "set/00/0").write_bytes(bytes(100))
    assert sweep(str(tmp_path / "cache"), PASSING, 0) == 0
    assert not (cache / "set/00/0").exists()
    assert all(path.exists() for path in (*foreign, tmp_path / "elsewhere/00/0"))
