"""Processes of a node fetch each record batch once, whichever of them is killed, and a loader of a
store delivers what one of a folder does."""

import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from support import PROGRAMS, warm
from support.data_sets import MakeDataset, WriteDataset
from support.delivery import open_loader, realistic_lengths, small_batches, spans
from support.object_server import FAST, Fault, remote_store
from support.processes import eventually
from support.programs.cache_reader import digest_of, maker_of
from support.stores import RangedFolder, cached_files
from support.training import make_config, run, write_counting

from tokenfeed.pipeline.errors import RemoteError
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.format.store import STORES

PLENTY = 1 << 30


@pytest.fixture
def folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return make_dataset(realistic_lengths(2000), num_shards=3)


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> RangedFolder:
    return RangedFolder(folder, tmp_path / "requests")


def num_pieces(folder: Path) -> int:
    """Record batches and footers."""
    (split,) = open_splits([folder], "train")
    return split.batches + len(split.split.shards)


class Readers:
    """Processes that read the same data through one cache, from the same moment on."""

    def __init__(
        self,
        store: RangedFolder,
        seeds: list[int],
        *,
        bound: int = PLENTY,
        delay_s: float = 0.03,
        epochs: int = 1,
    ) -> None:
        cache = store.log.with_name("cache") / "v2"
        cache.mkdir(parents=True, exist_ok=True)
        said = [store.folder, store.log, cache, bound, delay_s]
        self.processes = [
            warm.Popen(
                [PROGRAMS / "cache_reader.py", *said, seed, epochs],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for seed in seeds
        ]
        for process in self.processes:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        for process in self.processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()

    def __enter__(self) -> "Readers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def digests(self) -> list[int | None]:
        """What each read; None of those that were killed."""
        ends = [process.communicate(timeout=300)[0] for process in self.processes]
        return [json.loads(end) if end else None for end in ends]


@pytest.mark.parametrize(
    ("processes", "kills"),
    [pytest.param(8, 0, marks=pytest.mark.long), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_processes_of_a_node_ask_once_for_each_record_batch(
    store: RangedFolder, processes: int, kills: int
) -> None:
    pieces = num_pieces(store.folder)
    with Readers(store, [0] * processes) as readers:
        if kills:
            assert eventually(lambda: len(store.requests()) > pieces // 3)
        for process in readers.processes[:kills]:
            process.kill()
        digests = readers.digests()
    alone = digest_of(maker_of(store.folder, None), 1)
    assert digests[kills:] == [alone] * (processes - kills)
    asked = Counter(store.requests())
    assert len(asked) == pieces
    on_their_way = kills * (64 + 16)
    assert sum(asked.values()) - pieces <= on_their_way
    if not kills:
        assert set(asked.values()) == {1}


@pytest.mark.long
def test_two_runs_share_a_cache_that_holds_half(store: RangedFolder) -> None:
    total = sum(path.stat().st_size for path in store.folder.glob("train/*"))
    with Readers(store, [0, 1], bound=total // 2, epochs=2, delay_s=0.001) as readers:
        digests = readers.digests()
    assert digests == [digest_of(maker_of(store.folder, None, seed), 2) for seed in (0, 1)]
    files = cached_files(store.log.with_name("cache"))
    assert sum(path.stat().st_size for path in files) <= total // 2


@pytest.mark.long
def test_fifty_kills_at_random_moments_leave_a_cache_that_is_right(store: RangedFolder) -> None:
    alone = digest_of(maker_of(store.folder, None), 1)
    total = sum(path.stat().st_size for path in store.folder.glob("train/*"))
    chance = random.Random(0)
    for nth in range(50):
        bound = chance.choice([PLENTY, total // 2])
        with Readers(store, [0] * 3, bound=bound, delay_s=0.005) as readers:
            time.sleep(chance.uniform(0, 0.4))
            readers.processes[nth % 3].kill()
            digests = readers.digests()
        assert {digest for digest in digests if digest is not None} == {alone}
        assert sum(digest is not None for digest in digests) >= 2
        if nth % 5 == 4:  # begin anew: else nothing would be fetched any more
            for path in cached_files(store.log.with_name("cache")):
                path.unlink()


def delivered(loader: Iterator[object]) -> list[object]:
    return [spans(batch) for batch in loader]  # type: ignore[arg-type]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.filterwarnings("ignore:`cache_dir` and `cache_bytes` have no effect")
def test_a_run_moves_between_a_folder_and_a_store(store: RangedFolder, tmp_path: Path) -> None:
    options = {"cache_dir": tmp_path / "cache", "cache_bytes": PLENTY}
    whole = open_loader(store.folder)
    expected = delivered(iter(whole))
    places: list[Path | RangedFolder] = [store, store.folder, store]
    found, state = [], None
    for place in places:
        own = options if place is store else {}
        with open_loader(place, **own) as loader:  # type: ignore[arg-type]
            if state:
                loader.load_state_dict(state)
            found += delivered(islice(loader, 30 if len(found) < 60 else None))
            state = json.loads(json.dumps(loader.state_dict()))
            stats = loader.stats().remote
            assert (stats is not None) == (place is store)
    assert found == expected
    assert state == whole.state_dict()


def test_a_loader_reads_an_object_store_that_fails_now_and_then(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    with remote_store(monkeypatch, replace(FAST, give_up_s=60.0, read_s=5.0)) as remote:
        for path in (path for path in folder.rglob("*") if path.is_file()):
            remote.put(path.relative_to(folder).as_posix(), path.read_bytes())
        remote.proxy.schedule.extend([None, Fault("503"), None, Fault("reset body"), Fault("flip")])
        with open_loader(remote.store, cache_dir=tmp_path) as loader:  # type: ignore[arg-type]
            found = delivered(iter(loader))
            stats = loader.stats().remote
    assert found == delivered(iter(open_loader(folder)))
    assert stats
    assert stats.retries + stats.damaged >= 1


@pytest.mark.usefixtures("forked_workers")
def test_statistics_tell_what_came_from_where(store: RangedFolder, tmp_path: Path) -> None:
    pieces = num_pieces(store.folder)
    for first in (True, False):
        with open_loader(store, num_workers=1, cache_dir=tmp_path) as loader:  # type: ignore[arg-type]
            assert sum(1 for _ in loader)
            found = loader.stats().remote
        assert found
        assert found.retries == found.damaged == 0
        if first:
            assert found.bytes > 0
            assert 0 < found.requests <= pieces
        else:
            assert (found.requests, found.hits >= pieces) == (0, True)
        assert found.wait_s.max > 0


@pytest.mark.usefixtures("forked_workers")
def test_a_store_is_never_read_in_the_training_process(store: RangedFolder, tmp_path: Path) -> None:
    with open_loader(store, num_workers=0, cache_dir=tmp_path) as loader:  # type: ignore[arg-type]
        assert loader.num_workers == 1
        next(iter(loader))
        loader.num_workers = 0
        assert loader.num_workers == 1
    whole = open_loader(store, window_tokens=1 << 30, cache_dir=tmp_path)  # type: ignore[arg-type]
    assert len(whole) == len(open_loader(store.folder, window_tokens=1 << 30))
    assert not store.mine


@pytest.mark.usefixtures("forked_workers")
def test_an_error_comes_at_its_windows_turn_and_the_loader_goes_on_when_it_is_mended(
    store: RangedFolder,
) -> None:
    expected = delivered(iter(open_loader(store.folder)))
    with open_loader(store, cache_bytes=0) as loader:  # type: ignore[arg-type]
        found = delivered(islice(loader, 1))
        (store.folder / "broken").touch()
        with pytest.raises(RemoteError, match=r"ranged://set1/train/0.*arrow: broken for a test"):
            found.extend(spans(batch) for batch in loader)
        (store.folder / "broken").unlink()
        found += delivered(iter(loader))
    assert found == expected


@pytest.mark.filterwarnings("ignore:`cache_dir` and `cache_bytes` have no effect")
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_training_reads_a_store_and_reports_what_it_took(
    write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_counting(write_dataset, tmp_path / "out")
    store = RangedFolder(folder, tmp_path / "requests")
    monkeypatch.setitem(STORES, "ranged", lambda _: store)
    local, remote = (
        run(make_config(shards, tmp_path / name, steps=4, cache_dir=cache))
        for name, shards, cache in (
            ("one", folder, None),
            ("two", "ranged://out", tmp_path / "cache"),
        )
    )
    assert (remote.loss_first, remote.loss_last) == (local.loss_first, local.loss_last)
    assert local.remote is None
    assert "\nstore " not in local.summary()
    assert remote.remote
    assert remote.remote.requests > 0
    assert f"\nstore    {remote.remote.requests} requests" in remote.summary()
    assert cached_files(tmp_path / "cache")
    settings = {"cache_dir": tmp_path / "none", "cache_bytes": 0}
    without = run(make_config("ranged://out", tmp_path / "three", steps=4, **settings))
    assert without.loss_last == local.loss_last
    assert not (tmp_path / "none").exists()
