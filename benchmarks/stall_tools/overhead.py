"""What the hooks of `tokenfeed stall` cost in a step: CPU time of the thread that trains.

Blocks of steps with and without the hooks follow each other, in turn first. Only the calls that the
hooks watch are timed: fetch, forward, backward, optimizer. Work between them takes the rest of the
step, and leaves nothing of the hooks in the caches. The thread that reads stacks is counted apart.

usage: python -m benchmarks.stall_tools.overhead   # a loop without work, for a machine in use
"""

import contextlib
import cProfile
import io
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import tokenfeed
from benchmarks.protocol import summary

__all__ = ["STEP_MS", "overhead"]

STEP_MS = (15, 45)
STEPS, WARM_STEPS, PAIRS = 40, 8, 8
TINY_STEPS, TINY_PAIRS = 300, 12


class _Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(64)


class _Loop:
    def __init__(self, seconds: float) -> None:
        self._model = torch.nn.Linear(64, 64)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._matrix, self._long = torch.rand(256, 256), torch.rand(4_000_000)
        began = time.thread_time()
        self._work(10)
        self._units = max(2, round(10 * seconds / (time.thread_time() - began)))

    def _work(self, units: int) -> None:
        for _ in range(units):
            self._matrix @ self._matrix
            self._long.mul_(1.0)

    def run(self, steps: int) -> float:
        """Return the CPU seconds of a step in the calls that hooks watch."""
        now, found = time.thread_time, []
        rows = iter(DataLoader(_Rows(), batch_size=4))
        for _ in range(WARM_STEPS + steps):
            began = now()
            batch = next(rows)
            seconds = now() - began
            self._work(self._units // 2)
            began = now()
            self._model(batch).sum().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            found.append(seconds + now() - began)
            self._work(self._units - self._units // 2)
        return median(found[WARM_STEPS:])


def overhead(step_ms: float, *, steps: int = STEPS, pairs: int = PAIRS) -> dict[str, Any]:
    """Return the cost of the hooks in steps of this length."""
    torch.set_num_threads(1)
    loop = _Loop(step_ms / 1e3)
    loop.run(steps)
    more, others = [], []
    for number in range(pairs):
        seconds = {}
        for is_watched in (True, False) if number % 2 else (False, True):
            watch = tokenfeed.watch() if is_watched else contextlib.nullcontext()
            with contextlib.redirect_stderr(io.StringIO()), watch:
                began = time.process_time() - time.thread_time(), time.perf_counter()
                seconds[is_watched] = loop.run(steps)
                other = time.process_time() - time.thread_time() - began[0]
                if is_watched:
                    others.append(100 * other / (time.perf_counter() - began[1]))
        more.append(seconds[True] - seconds[False])
    return {
        "step_ms": step_ms,
        "pairs": pairs,
        "microseconds_a_step": summary([1e6 * each for each in more]),
        "percent_of_a_step": summary([1e5 * each / step_ms for each in more], 2),
        "percent_of_a_core_in_other_threads": summary(others, 2),
    }


def _tiny_loop() -> Callable[[int], list[int]]:
    """Return a loop of hardly any work. It returns the nanoseconds of CPU time of each step."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = iter(DataLoader(torch.zeros(10**6, 4), batch_size=1))

    def run(steps: int) -> list[int]:
        now, found = time.thread_time_ns, []
        for _ in range(steps):
            began = now()
            model(next(rows)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(now() - began)
        return found

    return run


def tiny_overhead() -> dict[str, float]:
    """Return what the hooks add to a step without work: the difference of the shortest steps, and
    the calls of Python and of C. Both are alike on a machine in use."""
    torch.set_num_threads(1)
    run, least, calls = _tiny_loop(), {True: 10**9, False: 10**9}, {}
    for number in range(TINY_PAIRS):
        for is_watched in (True, False) if number % 2 else (False, True):
            watch = tokenfeed.watch() if is_watched else contextlib.nullcontext()
            with contextlib.redirect_stderr(io.StringIO()), watch:
                run(TINY_STEPS // 6)
                least[is_watched] = min(least[is_watched], *run(TINY_STEPS))
                profiler = cProfile.Profile()
                profiler.runcall(run, TINY_STEPS)
                found = sum(each.callcount for each in profiler.getstats()) / TINY_STEPS
                calls[is_watched] = min(found, calls.get(is_watched, found))
    return {
        "microseconds_a_step": round((least[True] - least[False]) / 1e3, 1),
        "calls_a_step": round(calls[True] - calls[False]),
    }


if __name__ == "__main__":
    print(json.dumps(tiny_overhead()))
