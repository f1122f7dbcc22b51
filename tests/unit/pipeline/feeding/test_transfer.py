"""The handover between copy stream and compute stream, on simulated streams, events and leases."""

import mmap
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from support.delivery import MakeDataset, open_loader, spans
from support.simulated_cuda import CUDA_1, FakeSource, SimulatedCuda, started

from tokenfeed import Batch
from tokenfeed.pipeline.errors import ShardFormatError
from tokenfeed.pipeline.feeding import transfer
from tokenfeed.pipeline.feeding.batch import BatchForm
from tokenfeed.pipeline.feeding.stats import Counters
from tokenfeed.pipeline.feeding.transfer import PageLock
from tokenfeed.pipeline.feeding.window_source import InlineSource
from tokenfeed.pipeline.planning.batching import Round
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.policies import Batching, Fixed, Packed
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import RankSlice

DEVICE = torch.device("cuda:0")

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def feed_of(source: FakeSource) -> transfer.Batches:
    return transfer.copy_ahead(source, transfer.copy_stream(DEVICE), BatchForm(0), Counters())


def number_of(delivered: tuple[Batch, Round]) -> int:
    return int(delivered[0]["input_ids"].item())


def test_copies_run_ahead_by_a_fixed_number_also_over_a_seam(cuda: SimulatedCuda) -> None:
    feed = feed_of(FakeSource(cuda, [4, 4, 4]))
    for delivered in range(1, 9):
        next(feed)
        assert len(cuda.copy.recorded) == delivered + transfer.COPIES_AHEAD


def test_an_event_that_passed_gives_the_memory_back_without_a_wait(cuda: SimulatedCuda) -> None:
    source = FakeSource(cuda, [2] * 20)
    feed = feed_of(source)
    for _ in range(30):
        next(feed)
        for event in cuda.copy.recorded:
            event.passed = True
    assert len(source.released) >= len(source.taken) - 2
    assert not any(event.was_waited_for for event in cuda.copy.recorded)


@pytest.mark.parametrize("sizes", [[1] * 40, [2, 1, 5] * 12, [7] * 6])
def test_at_most_two_windows_are_held_however_slow_the_copies(
    cuda: SimulatedCuda, sizes: list[int]
) -> None:
    """A worker has three slots: two held, one in which it works."""
    source = FakeSource(cuda, sizes)
    feed = feed_of(source)
    for number in range(36):
        assert number_of(next(feed)) == number
    assert source.most_held == 2
    assert source.released == sorted(source.released)


def test_finished_batches_are_handed_over_while_the_next_window_is_not_ready(
    cuda: SimulatedCuda,
) -> None:
    source = FakeSource(cuda, [6, 6], ready=1)
    feed = feed_of(source)
    for number in range(6):
        assert number_of(next(feed)) == number
        assert len(source.taken) == 1, "it waited for a worker while batches were queued"
    assert number_of(next(feed)) == 6, "with nothing queued it has to wait"
    assert len(source.taken) == 2


def test_the_end_waits_for_copies_that_still_run(cuda: SimulatedCuda) -> None:
    feed = feed_of(FakeSource(cuda, [2, 2, 9]))
    for _ in range(3):
        next(feed)
    for event in cuda.copy.recorded:
        event.passed = False
    feed.close()
    assert all(event.passed for event in cuda.copy.recorded[-transfer.COPIES_AHEAD :])


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.filterwarnings("ignore:the system refused to page-lock")
def test_memory_is_page_locked_until_undone_and_only_if_that_worked(
    cuda: SimulatedCuda, refuses: bool
) -> None:
    cuda.refuses = refuses
    memory = mmap.mmap(-1, 8192)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    undo = PageLock(DEVICE, Counters()).lock(memory)
    assert cuda.locked == ({} if refuses else {address: (8192, 1)})
    undo()
    assert cuda.marks == (["register"] if refuses else ["register", "unregister"])
    memory.close()  # nothing holds on to it


def test_batch_copied_ahead_in_inference_mode_trains_later(
    folder: Path, cuda: SimulatedCuda
) -> None:
    batches = iter(open_loader(folder, device=DEVICE))
    with torch.inference_mode():
        next(batches)
    for batch in islice(batches, 3):
        assert not any(tensor.is_inference() for tensor in batch.tensors())


@pytest.mark.parametrize("batching", [Packed(64, 4, split=True), Fixed(4)], ids=str)
def test_a_full_batch_is_widened_without_a_gather_on_a_device(
    make_dataset: MakeDataset, cuda: SimulatedCuda, batching: Batching
) -> None:
    folder = make_dataset([64] * 40)
    batch = next(iter(open_loader(folder, batching, device=DEVICE)))
    assert batch.num_tokens == batch.num_slots
    assert not {"index", "where", "cumsum", "bucketize"}.intersection(cuda.launched)


@pytest.mark.cuda
@on_a_gpu
def test_memory_of_workers_is_really_page_locked() -> None:
    memory = mmap.mmap(-1, 1 << 21)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    assert not tensor.is_pinned()
    undo = PageLock(DEVICE, Counters()).lock(memory)
    assert tensor.is_pinned()
    undo()
    assert not tensor.is_pinned()


@pytest.mark.cuda
@on_a_gpu
def test_a_refused_page_lock_leaves_no_error_for_the_next_kernel() -> None:
    memory = mmap.mmap(-1, 1 << 21)
    undo, counters = PageLock(DEVICE, Counters()).lock(memory), Counters()
    with pytest.warns(RuntimeWarning, match="CUDA error 712"):
        PageLock(DEVICE, counters).lock(memory)  # locked already
    assert torch.ones(1, device=DEVICE).item() == 1
    assert counters.pageable
    undo()


def test_the_current_device_is_resolved_once(folder: Path, cuda: SimulatedCuda) -> None:
    cuda.current = 1
    loader = open_loader(folder, device="cuda")
    cuda.current = 0
    assert loader.device == CUDA_1


def test_the_error_of_a_window_comes_after_the_batches_that_are_ready(cuda: SimulatedCuda) -> None:
    feed = transfer.copy_ahead(
        FakeSource(cuda, [3, 4]), transfer.copy_stream(CUDA_1), BatchForm(0), Counters()
    )
    delivered: list[int] = []
    with pytest.raises(ShardFormatError):
        delivered.extend(int(batch["input_ids"].item()) for batch, _ in feed)
    assert delivered == list(range(7))
    assert all(event.passed for event in cuda.copy.recorded)


def test_an_interrupt_is_not_kept_waiting_by_batches_that_are_ready(cuda: SimulatedCuda) -> None:
    source = FakeSource(cuda, [3])
    feed = transfer.copy_ahead(source, transfer.copy_stream(CUDA_1), BatchForm(0), Counters())
    next(feed)

    def interrupt() -> None:
        raise KeyboardInterrupt

    source.take = interrupt  # type: ignore[assignment, method-assign]
    with pytest.raises(KeyboardInterrupt):
        next(feed)


def test_a_pass_ends_as_on_the_host_whatever_happens_to_the_next_one(
    folder: Path, cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = [spans(batch) for batch in open_loader(folder)]
    read = WindowMaker.make

    def read_one_epoch(maker: WindowMaker, position: Position) -> RankSlice:
        if position.epoch:
            raise ShardFormatError("damaged")
        return read(maker, position)

    monkeypatch.setattr(WindowMaker, "make", read_one_epoch)
    monkeypatch.setattr(InlineSource, "is_ready", lambda source: True)
    loader = open_loader(folder, device=CUDA_1)
    assert [spans(batch) for batch in loader] == host
    with pytest.raises(ShardFormatError):
        next(iter(loader))


def test_all_loaders_of_a_device_copy_on_one_urgent_stream(
    folder: Path, cuda: SimulatedCuda
) -> None:
    loaders = [started(folder, num_workers=0) for _ in range(3)]
    loaders[0].close()
    next(iter(loaders[0]))
    assert cuda.made == [(1, -1)]
