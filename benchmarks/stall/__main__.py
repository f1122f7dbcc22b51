"""What does the stall meter cost, and is it right?

On the CPU, here: steps of 20 ms with the meter and with none, in blocks of 50 by turns, timed call
by call where a loop calls the meter. Between the calls the thread computes and walks through
memory, as a training does, which leaves the meter nothing in the caches; or it sleeps, and the core
is slow at first. With --device cuda also each fault of case.py, as `make gpu` runs them.

usage: python -m benchmarks.stall [--device cpu|cuda] [--small]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.protocol import summary, write_result
from benchmarks.stall.case import FAULTS
from tokenfeed.trainer.stall import StallMeter

__all__ = ["overhead"]

STEP_SECONDS = 0.02
BLOCK_STEPS, BLOCKS = 50, 20
MICRO_BATCHES = 2

Pause = Callable[[], None]


class NoMeter:
    """What a loop without a meter calls."""

    def watch(self, batches: Iterable[int]) -> Iterable[int]:
        """The same."""
        return batches

    def step(self, tokens: int, slots: int) -> None:
        """Nothing."""


def sleep() -> None:
    """As a host that waits for its device."""
    time.sleep(STEP_SECONDS / MICRO_BATCHES)


def worker() -> Pause:
    """As a host that computes: products of matrices, and a walk through 32 MB."""
    matrix, long = torch.rand(512, 512), torch.rand(8_000_000)

    def work() -> None:
        end = time.perf_counter() + STEP_SECONDS / MICRO_BATCHES
        while time.perf_counter() < end:
            matrix @ matrix
            long.mul_(1.0)

    return work


def seconds_of_calls(meter: StallMeter | NoMeter, pause: Pause, steps: int) -> float:
    """What a loop spends in a meter, by step of two batches: all but its work."""
    feed, now = iter(meter.watch(iter(int, 1))), time.perf_counter
    seconds = 0.0
    for _ in range(steps):
        for _ in range(MICRO_BATCHES):
            began = now()
            next(feed)
            seconds += now() - began
            pause()
        began = now()
        meter.step(tokens=1000, slots=1024)
        seconds += now() - began
    return seconds / steps


def overhead(name: str, pause: Pause, blocks: int, steps: int) -> dict[str, Any]:
    """Seconds of the meter as a share of a step, over pairs of blocks."""
    meter, none = StallMeter("cpu", skipped_steps=1), NoMeter()
    seconds_of_calls(meter, pause, steps)  # what is imported late, is
    pairs = [
        (seconds_of_calls(none, pause, steps), seconds_of_calls(meter, pause, steps))
        for _ in range(blocks)
    ]
    shares = [100 * (metered - bare) / STEP_SECONDS for bare, metered in pairs]
    return {
        "case": f"overhead on the CPU, {name}",
        "step_ms": 1e3 * STEP_SECONDS,
        "blocks": blocks,
        "steps_a_block": steps,
        "percent_of_a_step": summary(shares, 3),
        "microseconds_a_step": round(1e6 * statistics.median(m - b for b, m in pairs), 1),
    }


def fault(name: str, device: str, *, small: bool) -> dict[str, Any]:
    """One fault of case.py."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.stall.case",
        name,
        "--device",
        device,
        *["--small"] * small,
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"case": name} | json.loads(said.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--small", action="store_true", help="seconds, to try the script")
    options = parser.parse_args()
    blocks, steps = (2, 5) if options.small else (BLOCKS, BLOCK_STEPS)
    torch.set_num_threads(1)
    results = []
    for name, pause in (("between work", worker()), ("between sleeps", sleep)):
        results.append(overhead(name, pause, blocks, steps))
        print(json.dumps(results[-1]), flush=True)
    for name in FAULTS if options.device == "cuda" else ():
        results.append(fault(name, options.device, small=options.small))
        print(json.dumps(results[-1]), flush=True)
    if not options.small:
        write_result(f"stall-{options.device}", results)


if __name__ == "__main__":
    main()
