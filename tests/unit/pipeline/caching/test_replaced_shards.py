"""A shard that is replaced while it is read is found, also where all of its record batches fit."""

import itertools
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_sets import WriteDataset
from support.delivery import small_batches
from support.object_server import Remote, StoredObject, as_own_process, remote_store
from support.stores import cached_reader

from tokenfeed.pipeline.errors import ShardFormatError
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.windows.reader import WindowReader

pytest.importorskip("obstore")

VOCABULARY_SIZE = 1 << 16
"""Random ids of two bytes: nothing can be compressed, so equal rows take equal bytes."""
SHARD = "train/00000.arrow"
BATCHES = np.arange(8)
examples = settings(max_examples=12)


@pytest.fixture
def folder(write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return made(write_dataset, tmp_path / "set", seed=0)


@pytest.fixture
def other(write_dataset: WriteDataset, folder: Path) -> bytes:
    """The shard of another data set, whose record batches lie where those of the first one do."""
    return (made(write_dataset, folder.parent / "other", seed=1) / SHARD).read_bytes()


def made(write_dataset: WriteDataset, folder: Path, seed: int) -> Path:
    lengths = np.full(8 * 30, 100)
    ids = np.random.default_rng(seed).integers(0, VOCABULARY_SIZE, lengths.sum())
    return write_dataset(folder, {"train": (ids, lengths)}, VOCABULARY_SIZE)


@pytest.fixture
def remote(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    as_own_process(monkeypatch)
    with remote_store(monkeypatch) as found:
        found.put_folder(folder)
        yield found


def rows_of(folder: Path) -> np.ndarray:
    return WindowReader(open_splits([folder], "train")).read(BATCHES).rows.ids


def of_another_time(data: bytes) -> StoredObject:
    return StoredObject(data, modified="Sun, 01 Jan 2017 00:00:00 GMT")


@pytest.mark.parametrize("etags", [None, itertools.repeat("")], ids=["etags", "times"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_shard_that_took_the_place_of_another_is_found(
    remote: Remote, other: bytes, tmp_path: Path, kept: bool, etags: Iterator[str] | None
) -> None:
    remote.server.etags = etags
    reader = cached_reader(remote, tmp_path if kept else None)
    reader.read(BATCHES[:4])
    remote.server.objects[f"{remote.prefix}/{SHARD}"] = of_another_time(other)
    for _ in range(2):
        with pytest.raises(ShardFormatError, match=r"00000.arrow: holds other rows"):
            reader.read(BATCHES[4:])


def test_a_footer_that_was_kept_is_not_taken_for_that_of_another_shard(
    folder: Path, remote: Remote, other: bytes, tmp_path: Path
) -> None:
    cached_reader(remote, tmp_path).read(BATCHES[:4])
    mine = remote.content(SHARD)
    remote.put(SHARD, other)
    with pytest.raises(ShardFormatError, match=r"00000.arrow: holds other rows"):
        cached_reader(remote, tmp_path).read(BATCHES)
    remote.put(SHARD, mine)
    found = cached_reader(remote, tmp_path).read(BATCHES)
    assert np.array_equal(found.rows.ids, rows_of(folder))


@examples
@given(st.lists(st.text('ab/\\"[]{},', max_size=3), min_size=1, max_size=12))
def test_replicas_that_name_equal_objects_differently_are_no_error(
    folder: Path, remote: Remote, names: list[str]
) -> None:
    etags = [f'"{name}"' for name in names]
    remote.server.etags = itertools.cycle(etags)
    remote.proxy.seen.clear()
    with TemporaryDirectory() as cache:
        found = cached_reader(remote, Path(cache)).read(BATCHES)
    assert np.array_equal(found.rows.ids, rows_of(folder))
    if len(set(etags)) == 1:
        assert len(requests(remote)) == len(BATCHES) + 1
    assert len(requests(remote)) <= 4 * len(BATCHES) + 1 + 32


class Replicas(dict[str, StoredObject]):
    """The objects of a server of which one answers after the other; some have another shard."""

    def __init__(self, remote: Remote, shards: list[bytes]) -> None:
        super().__init__(remote.server.objects)
        self._shard = f"{remote.prefix}/{SHARD}"
        self._lock = threading.Lock()
        self._turns = itertools.cycle(map(StoredObject, shards))

    def get(self, name: str, default: StoredObject | None = None) -> StoredObject | None:  # type: ignore[override]
        with self._lock:
            return next(self._turns) if name == self._shard else super().get(name, default)


@examples
@given(st.lists(st.booleans(), min_size=1, max_size=4))
def test_of_replicas_that_differ_no_other_row_is_read(
    folder: Path, remote: Remote, other: bytes, are_mine: list[bool]
) -> None:
    mine = (folder / SHARD).read_bytes()
    remote.server.objects = Replicas(remote, [mine if is_mine else other for is_mine in are_mine])
    try:
        found = cached_reader(remote, None).read(BATCHES).rows.ids
    except ShardFormatError as error:
        assert not all(are_mine)
        assert re.search("holds other rows|was replaced", str(error))
    else:
        assert np.array_equal(found, rows_of(folder))


def test_versions_that_are_ever_new_say_nothing(
    folder: Path, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    remote.server.etags = (f'"{number}"' for number in itertools.count())
    reader = cached_reader(remote, None)
    with caplog.at_level(logging.INFO, "tokenfeed"):
        for asked in (4 * len(BATCHES) + 1 + 32, len(BATCHES)):
            remote.proxy.seen.clear()
            assert np.array_equal(reader.read(BATCHES).rows.ids, rows_of(folder))
            assert len(requests(remote)) <= asked
    assert caplog.messages[-1].startswith(
        f"s3://{remote.prefix}/{SHARD}: its version changes on every request"
    )


def requests(remote: Remote) -> list[str]:
    return [line for line in remote.proxy.seen if line.endswith(SHARD)]
