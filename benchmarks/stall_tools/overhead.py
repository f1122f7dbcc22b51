"""What the hooks of `tokenfeed stall` cost in a step: CPU time of the thread that trains.

Blocks of steps with and without the hooks follow each other, in turn first. Only the calls that the
hooks watch are timed: fetch, forward, backward, optimizer. Work between them takes the rest of the
step, and leaves nothing of the hooks in the caches. The thread that reads stacks is counted apart.

Refuted if the hooks cost 0.5 % of a step of 15 ms. The times need a quiet machine. The counts of
calls and instructions of Python do not.

usage: python -m benchmarks.stall_tools.overhead && python -m benchmarks.readme    # five minutes
"""

import contextlib
import functools
import io
import json
import sys
import time
from collections import Counter
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import tokenfeed
from benchmarks.protocol import summary, write_result

__all__ = ["STEP_MS", "counts", "overhead"]

STEP_MS = (15, 45)
STEPS, WARM_STEPS = 40, 8
SECONDS = 144.0
"""Time of all blocks for one length of steps."""


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

    def train(self, rows: Any, steps: int) -> None:
        """Train steps of the calls that hooks watch, and of nothing else."""
        for _ in range(steps):
            self._model(next(rows)).sum().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

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


def overhead(step_ms: float) -> dict[str, Any]:
    """Return the cost of the hooks in steps of this length."""
    steps, pairs = STEPS, round(SECONDS / (STEPS + WARM_STEPS) / 2 / step_ms * 1e3)
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


def counts(steps: int = 31) -> dict[str, float]:
    """Return the calls and the instructions of Python that the hooks add to most steps."""
    found: dict[bool, list[float]] = {}
    for is_watched in (False, True):
        seen = Counter[str]()

        def trace(frame: Any, event: str, _: Any, seen: Counter[str] = seen) -> Any:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            seen[event] += 1
            return trace

        def profile(_: Any, event: str, __: Any, seen: Counter[str] = seen) -> None:
            seen[event] += event == "c_call"

        loop, watch = _Loop(0.0), tokenfeed.watch() if is_watched else contextlib.nullcontext()
        rows, medians = iter(DataLoader(_Rows(), batch_size=4)), []
        with contextlib.redirect_stderr(io.StringIO()), watch:
            loop.train(rows, 3 * steps)
            for start, watcher, event in (
                (sys.settrace, trace, "call"),
                (sys.setprofile, profile, "c_call"),
                (sys.settrace, trace, "opcode"),
            ):
                start(watcher)
                each = []
                for _ in range(steps):
                    before = seen[event]
                    loop.train(rows, 1)
                    each.append(seen[event] - before)
                start(None)
                medians.append(median(each))
        found[is_watched] = medians
    calls, calls_of_c, instructions = (
        b - a for a, b in zip(found[False], found[True], strict=True)
    )
    return {"calls_a_step": calls + calls_of_c, "instructions_a_step": instructions}


if __name__ == "__main__":
    found = []
    for measured in (counts, *(functools.partial(overhead, step_ms) for step_ms in STEP_MS)):
        found.append(measured())
        print(json.dumps(found[-1]), flush=True)
    write_result("overhead", found)
