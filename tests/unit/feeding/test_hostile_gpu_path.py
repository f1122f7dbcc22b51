"""The way to a GPU where things go wrong: refused page locks, failed kernels, ends of all kinds."""

from pathlib import Path

import pytest
from delivery import (
    open_loader,
    spans,
)
from simulated import CUDA_1, FakeSource, SimulatedCuda, started

from tokenfeed.pipeline.errors import ShardFormatError
from tokenfeed.pipeline.feeding import transfer
from tokenfeed.pipeline.feeding.window_source import InlineSource
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import RankSlice


def test_the_current_device_is_resolved_once(folder: Path, cuda: SimulatedCuda) -> None:
    cuda.current = 1
    loader = open_loader(folder, device="cuda")
    cuda.current = 0
    assert loader.device == CUDA_1


def test_the_error_of_a_window_comes_after_the_batches_that_are_ready(cuda: SimulatedCuda) -> None:
    feed = transfer.copy_ahead(FakeSource(cuda, [3, 4]), transfer.copy_stream(CUDA_1), 0)
    delivered: list[int] = []
    with pytest.raises(ShardFormatError):
        delivered.extend(int(batch["input_ids"].item()) for batch, _ in feed)
    assert delivered == list(range(7))


def test_an_interrupt_is_not_kept_waiting_by_batches_that_are_ready(cuda: SimulatedCuda) -> None:
    source = FakeSource(cuda, [3])
    feed = transfer.copy_ahead(source, transfer.copy_stream(CUDA_1), 0)
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
