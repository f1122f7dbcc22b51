"""The handover between copy stream and compute stream, on simulated streams, events and leases."""

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from delivery import (
    POLICIES,
    MakeDataset,
    open_loader,
    realistic_lengths,
    small_batches,
)

from tokenfeed import Batch
from tokenfeed.pipeline.feeding import transfer
from tokenfeed.pipeline.feeding.source import Lease
from tokenfeed.pipeline.planning.layout import lay_out
from tokenfeed.pipeline.planning.policy import Batching, Padded
from tokenfeed.pipeline.planning.share import RaggedBatch, Share

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class FakeEvent:
    """Passes when the test says so, or when it is waited for."""

    def __init__(self) -> None:
        self.passed = self.was_waited_for = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.was_waited_for |= not self.passed
        self.passed = True


class FakeStream:
    """Keeps the events recorded on it and those it was told to wait for."""

    def __init__(self) -> None:
        self.recorded: list[FakeEvent] = []
        self.waited: list[FakeEvent] = []

    def record_event(self) -> FakeEvent:
        self.recorded.append(FakeEvent())
        return self.recorded[-1]

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event)


class Streams:
    """The two streams, and which tensors were recorded on the compute stream."""

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
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: streams.owned.append(id(tensor))
    )
    return streams


def share_of(first: int, count: int) -> Share:
    """Micro-batches of one token, which is their number."""
    per_token = {"input_ids": np.arange(first, first + count, dtype=np.uint16)}
    index = {"lengths": np.ones(count, np.int32), "batches": np.arange(count + 1)}
    index |= lay_out(per_token, index, Padded(1)) | {"filler": np.zeros(count, bool)}
    return Share(0, 0, per_token, index, index)


class FakeSource:
    """Windows of given sizes; ready as many at a time as the test says."""

    def __init__(self, streams: Streams, sizes: list[int], ready: int = 10**9) -> None:
        self.streams = streams
        self.sizes = deque(sizes)
        self.ready = ready
        self.taken: list[int] = []
        self.last_copy: dict[int, int] = {}
        """Which copy is the last of each window."""
        self.released: list[int] = []
        self.most_held = 0

    def take(self) -> Lease:
        number, size = len(self.taken), self.sizes.popleft()
        self.taken.append(size)
        self.ready -= 1
        self.last_copy[number] = sum(self.taken) - 1
        self.most_held = max(self.most_held, len(self.taken) - len(self.released))
        share = share_of(sum(self.taken) - size, size)
        return Lease(share, 0.0, 1, lambda: self._release(number))

    def _release(self, number: int) -> None:
        assert self.streams.copy.recorded[self.last_copy[number]].passed, "a copy still reads it"
        assert number not in self.released
        self.released.append(number)

    def is_ready(self) -> bool:
        return self.ready > 0

    def close(self) -> None:
        pass


Feed = Iterator[tuple[Batch, RaggedBatch]]


def feed_of(source: FakeSource) -> Feed:
    return transfer.copy_ahead(source, torch.device("cpu"), 0)


def number_of(delivered: tuple[Batch, RaggedBatch]) -> int:
    return int(delivered[0]["input_ids"].item())


def test_batches_come_in_order_each_after_its_event_was_waited_for(streams: Streams) -> None:
    feed = feed_of(FakeSource(streams, [3, 1, 1, 4, 9]))
    for number in range(12):
        batch, _ = next(feed)
        assert batch["input_ids"].tolist() == [[number]]
        assert streams.compute.waited == streams.copy.recorded[: number + 1]
        assert {id(tensor) for tensor in batch.tensors()} <= set(streams.owned)
    assert not any(event.was_waited_for for event in streams.copy.recorded[9:])


def test_copies_run_ahead_by_a_fixed_number_also_over_a_seam(streams: Streams) -> None:
    feed = feed_of(FakeSource(streams, [4, 4, 4]))
    for delivered in range(1, 9):
        next(feed)
        assert len(streams.copy.recorded) == delivered + transfer._COPIES_AHEAD


def test_a_window_is_released_only_after_its_last_copy_has_passed(streams: Streams) -> None:
    source = FakeSource(streams, [3, 5, 5])
    feed = feed_of(source)
    for _ in range(2):
        next(feed)
    for event in streams.copy.recorded[:2]:
        event.passed = True
    next(feed)
    assert source.released == [], "the last copy of the window still runs"
    streams.copy.recorded[2].passed = True
    next(feed)
    assert source.released == [0]


def test_an_event_that_passed_gives_the_memory_back_without_a_wait(streams: Streams) -> None:
    source = FakeSource(streams, [2] * 20)
    feed = feed_of(source)
    for _ in range(30):
        next(feed)
        for event in streams.copy.recorded:
            event.passed = True
    assert len(source.released) >= len(source.taken) - 2
    assert not any(event.was_waited_for for event in streams.copy.recorded)


@pytest.mark.parametrize("sizes", [[1] * 40, [2, 1, 5] * 12, [7] * 6])
def test_at_most_two_windows_are_held_however_slow_the_copies(
    streams: Streams, sizes: list[int]
) -> None:
    """A worker has three slots: two held, one in which it works."""
    source = FakeSource(streams, sizes)
    feed = feed_of(source)
    for number in range(36):
        assert number_of(next(feed)) == number
    assert source.most_held == 2
    assert source.released == sorted(source.released)


def test_finished_batches_are_handed_over_while_the_next_window_is_not_ready(
    streams: Streams,
) -> None:
    source = FakeSource(streams, [6, 6], ready=1)
    feed = feed_of(source)
    for number in range(6):
        assert number_of(next(feed)) == number
        assert len(source.taken) == 1, "it waited for a worker while batches were queued"
    assert number_of(next(feed)) == 6, "with nothing queued it has to wait"
    assert len(source.taken) == 2


def test_the_end_waits_for_copies_that_still_run(streams: Streams) -> None:
    feed = feed_of(FakeSource(streams, [2, 2, 9]))
    for _ in range(3):
        next(feed)
    for event in streams.copy.recorded:
        event.passed = False
    feed.close()  # type: ignore[attr-defined]
    assert all(event.passed for event in streams.copy.recorded[-transfer._COPIES_AHEAD :])


def test_an_error_of_the_source_waits_for_copies_too(streams: Streams) -> None:
    source = FakeSource(streams, [2])
    feed = feed_of(source)
    with pytest.raises(IndexError):  # the deque of windows is empty
        list(feed)
    assert all(event.passed for event in streams.copy.recorded)


@pytest.mark.parametrize("refused", [0, 1])
def test_memory_is_page_locked_until_undone_and_only_if_that_worked(
    monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    calls: list[tuple[Any, ...]] = []

    class Runtime:
        cudaHostRegister = staticmethod(lambda *arguments: calls.append(arguments) or refused)
        cudaHostUnregister = staticmethod(lambda *arguments: calls.append(arguments))

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    memory = mmap.mmap(-1, 8192)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    undo: Callable[[], None] = transfer.page_lock(memory)
    assert calls == [(address, 8192, 0)]
    undo()
    assert calls[1:] == ([] if refused else [(address,)])
    memory.close()  # nothing holds on to it


@pytest.fixture
def folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return make_dataset(realistic_lengths(), num_shards=3)


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batching", POLICIES, ids=str)
def test_batches_on_a_gpu_are_those_of_the_host(
    folder: Path, batching: Batching, num_workers: int
) -> None:
    options: dict[str, Any] = {"epochs": 3, "rank": 1, "world_size": 2, "gang_size": 3}
    host = list(open_loader(folder, batching, **options))
    with open_loader(folder, batching, num_workers=num_workers, device="cuda", **options) as loader:
        device = list(loader)
        state = loader.state_dict()
    for ours, theirs in zip(device, host, strict=True):
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name].cpu(), theirs[name]) for name in ours)
        assert (ours.rows.tolist(), ours.is_filler) == (theirs.rows.tolist(), theirs.is_filler)
    other = open_loader(folder, batching, **options)
    list(other)
    assert state == other.state_dict()


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("batching", POLICIES, ids=str)
def test_feeding_a_gpu_never_synchronises(folder: Path, batching: Batching) -> None:
    with open_loader(folder, batching, num_workers=2, epochs=None, device="cuda") as loader:
        feed = iter(loader)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(300):
                next(feed)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@on_a_gpu
def test_memory_of_workers_is_really_page_locked() -> None:
    memory = mmap.mmap(-1, 1 << 21)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    assert not tensor.is_pinned()
    undo = transfer.page_lock(memory)
    assert tensor.is_pinned()
    undo()
    assert not tensor.is_pinned()
