"""Clocks that only a test moves, so that a busy machine changes no figure of a stall meter."""

import contextlib
import mmap
import os
import time
from collections.abc import Iterator

import pytest
import torch

from tokenfeed.trainer.stall import StallMeter
from tokenfeed.trainer.stall.marks import Phase


class SimulatedClock:
    """Seconds of this process. `sleep` moves the clock, and each look takes a microsecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 7.0
        monkeypatch.setattr("time.perf_counter", self._look)
        monkeypatch.setattr("time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def _look(self) -> float:
        self.now += 1e-6
        return self.now


class SharedClock:
    """A clock of two ranks, to be made before they are forked. The late rank moves the clock, and
    only while the other rank waits for it."""

    def __init__(self) -> None:
        self._shared = memoryview(mmap.mmap(-1, 24)).cast("d")
        """The time, and how often each rank has begun to wait."""
        self._rank = 0

    def join(self, rank: int) -> None:
        """Use the clock in this process, and count from here on how often it begins to wait."""
        self._rank = rank
        time.perf_counter = lambda: self._shared[0]
        begin = StallMeter.begin

        def counted(meter: StallMeter, phase: Phase) -> object:
            outer = begin(meter, phase)
            self._shared[1 + rank] += phase == "communication"
            return outer

        StallMeter.begin = counted  # type: ignore[method-assign, assignment]

    def sleep(self, seconds: float) -> None:
        """Move the clock when the other rank waits for this one."""
        while self._shared[2 - self._rank] <= self._shared[1 + self._rank]:
            time.sleep(0.001)
        self._shared[0] += seconds


@contextlib.contextmanager
def two_ranks(folder: str | None = None) -> Iterator[tuple[int, SharedClock]]:
    """Fork this process: give each of the two its rank, and the clock that they share. The second
    ends here, and the first waits for it.

    Args:
        folder: Where they meet, to be one process group; None if something else joins them.
    """
    torch.set_num_threads(1)  # no threads, which forks would lack
    clock = SharedClock()
    rank = int(os.fork() == 0)
    clock.join(rank)
    if folder:
        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    yield rank, clock
    torch.distributed.destroy_process_group()
    if rank:
        os._exit(0)
    os.wait()
