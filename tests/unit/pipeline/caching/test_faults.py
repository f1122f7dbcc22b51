"""Whatever the network does, what is read through a cache is what the folder has."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_sets import MakeDataset
from support.delivery import realistic_lengths, small_batches
from support.object_server import FAST, FAULTS, Fault, Remote, as_own_process, remote_store
from support.stores import cached_reader

from tokenfeed.pipeline.errors import ShardFormatError
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.windows.reader import WindowReader

pytest.importorskip("obstore")

PATIENT = replace(FAST, give_up_s=60.0)
"""For a machine that is busy; what is short or reset is noticed without waiting."""


@pytest.fixture
def folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return make_dataset(realistic_lengths(600), num_shards=2)


@pytest.fixture
def remote(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    as_own_process(monkeypatch)
    with remote_store(monkeypatch, PATIENT) as found:
        found.put_folder(folder)
        yield found


def all_batches(folder: Path) -> np.ndarray:
    (split,) = open_splits([folder], "train")
    return np.arange(split.batches)


faults = st.builds(Fault, st.sampled_from([*FAULTS, "flip"]), st.integers(0, 5000), st.just(0.3))


@pytest.mark.slow
@settings(max_examples=8)
@given(st.lists(st.none() | faults, max_size=20), st.booleans())
def test_faults_change_nothing_that_is_read(
    folder: Path,
    remote: Remote,
    tmp_path_factory: pytest.TempPathFactory,
    schedule: list[Fault | None],
    kept: bool,
) -> None:
    reader = cached_reader(remote, tmp_path_factory.mktemp("cache") if kept else None)
    batches = all_batches(folder)
    before = remote.store.traffic
    remote.proxy.schedule.extend(schedule)
    found = reader.read(batches)
    remote.proxy.schedule.clear()
    expected = WindowReader(open_splits([folder], "train")).read(batches)
    assert np.array_equal(found.rows.ids, expected.rows.ids)
    assert np.array_equal(found.numbers, expected.numbers)
    flips = sum(fault is not None and fault.kind == "flip" for fault in schedule)
    assert reader.fetched
    assert reader.fetched.damaged <= flips
    pieces = len(batches) + 2
    traffic = remote.store.traffic
    asked_again = traffic.retries - before.retries + reader.fetched.damaged
    assert traffic.requests - before.requests <= pieces + asked_again
    if not any(schedule):
        assert traffic.requests - before.requests == pieces


def test_a_store_that_flips_every_answer_is_told_apart_from_a_cache_that_did(
    folder: Path, remote: Remote, tmp_path: Path
) -> None:
    reader = cached_reader(remote, tmp_path)
    remote.proxy.always = Fault("flip", 3000)
    with pytest.raises(ShardFormatError, match=r"^s3://bucket\d+/data/train/0000\d.arrow: .*Copy"):
        reader.read(all_batches(folder))
    remote.proxy.always = None
    assert reader.read(all_batches(folder)), "what was damaged is fetched again"
