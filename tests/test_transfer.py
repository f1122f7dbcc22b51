"""The handover between copy stream and compute stream, on simulated streams and events."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tokenfeed.pipeline import transfer
from tokenfeed.pipeline.batch import RaggedBatch
from tokenfeed.pipeline.plan import Position


class FakeEvent:
    """Passes when the test says so."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


class FakeStream:
    """Keeps the events recorded on it and those it was told to wait for."""

    def __init__(self, device: object = None) -> None:
        self.recorded: list[FakeEvent] = []
        self.waited: list[FakeEvent] = []

    def record_event(self) -> FakeEvent:
        self.recorded.append(FakeEvent())
        return self.recorded[-1]

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event)


class Streams:
    """The two streams, and on which tensors the compute stream was recorded."""

    def __init__(self) -> None:
        self.copy = FakeStream()
        self.compute = FakeStream()
        self.owned: list[int] = []


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Replaces the CUDA of `transfer`; its tensors stay on the CPU."""
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.copy)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.compute)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: streams.owned.append(id(tensor))
    )
    return streams


def numbered_batches(count: int, made: list[Any]) -> Iterator[transfer.Placed]:
    """Batches of one token that is their number; `made` gets a weak reference to each."""
    one = np.ones(1, np.int64)
    for number in range(count):
        ids = np.array([number], np.uint16)
        ragged = RaggedBatch(ids, one, one, one, np.arange(2), one, 1)
        made.append(weakref.ref(ids))
        yield ragged, Position(0, 0, number + 1)
        del ragged, ids


def test_batches_come_in_order_each_after_its_event_was_waited_for(streams: Streams) -> None:
    feed = transfer.copy_ahead(numbered_batches(7, []), torch.device("cpu"), 0)
    for number, (batch, after) in enumerate(feed):
        assert batch["input_ids"].tolist() == [[number]]
        assert after == Position(0, 0, number + 1)
        assert streams.compute.waited == streams.copy.recorded[: number + 1]
        assert {id(tensor) for tensor in batch.values()} <= set(streams.owned)
    assert number == 6


def test_copies_run_ahead_by_a_fixed_number(streams: Streams) -> None:
    made: list[Any] = []
    feed = transfer.copy_ahead(numbered_batches(10, made), torch.device("cpu"), 0)
    for delivered in range(1, 8):
        next(feed)
        assert len(made) == min(10, delivered + transfer._COPIES_AHEAD)


def test_memory_that_a_copy_reads_lives_until_its_event_has_passed(streams: Streams) -> None:
    made: list[Any] = []
    feed = transfer.copy_ahead(numbered_batches(9, made), torch.device("cpu"), 0)
    for _ in range(5):
        next(feed)
    gc.collect()
    assert all(ids() is not None for ids in made), "freed while a copy was reading it"
    for event in streams.copy.recorded[:3]:
        event.passed = True
    next(feed)
    gc.collect()
    assert [ids() is None for ids in made[:4]] == [True, True, True, False]


def test_the_end_waits_for_copies_that_still_run(streams: Streams) -> None:
    feed = transfer.copy_ahead(numbered_batches(9, []), torch.device("cpu"), 0)
    next(feed)
    assert not any(event.passed for event in streams.copy.recorded)
    feed.close()  # type: ignore[attr-defined]
    assert all(event.passed for event in streams.copy.recorded)
