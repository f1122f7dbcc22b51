"""`auto` takes this rank's share of the cores, as affinity and container allow, and no more."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenfeed.pipeline.feeding import worker


def spin() -> None:
    while True:
        pass


class _Busy:
    """A maker that works a while, and says how long the processor took for it."""

    def make(self, position: object) -> SimpleNamespace:
        started, clock = time.process_time(), time.perf_counter()
        while time.process_time() - started < 0.2:
            pass
        self.cpu_s, self.wall_s = time.process_time() - started, time.perf_counter() - clock
        return SimpleNamespace(num_bytes=1, write=lambda memory: None)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no count")
def test_waiting_for_a_core_is_no_work_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    maker, slot = _Busy(), SimpleNamespace(at_least=lambda size: None, size=0)
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        other = multiprocessing.get_context("fork").Process(target=spin)
        other.start()
        request, counter = worker.Request(None, 0), SimpleNamespace(new=lambda: None)
        made = worker._serve(maker, request, slot, counter)  # type: ignore[arg-type]
    finally:
        os.sched_setaffinity(0, before)
        os.kill(other.pid or 0, signal.SIGKILL)
        other.join()
    assert isinstance(made, worker.Reply)
    assert maker.wall_s > 1.3 * maker.cpu_s, "the other process took no time of this core"
    assert made.seconds < 1.2 * maker.cpu_s
