"""What does the stall meter cost, and is it right?

`simulated` (default): random loops on a simulated device, whose true idle time is known. The
results do not depend on the machine or its load. It takes about 20 minutes of two cores.

`overhead`: steps of 20 ms on the CPU with the meter and without, in blocks of 50 by turns, timed
call by call where a loop calls the meter. Between the calls the thread computes and walks through
memory, as a training does, which leaves the meter nothing in the caches; or it sleeps, and the core
is slow at first.

usage: python -m benchmarks.stall [simulated|overhead] [--small]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.protocol import summary, write_result
from benchmarks.stall.simulated import judge_all, loops_of, summaries
from tokenfeed.trainer.stall import StallMeter

STEP_SECONDS = 0.02
BLOCK_STEPS, BLOCKS = 50, 20
MICRO_BATCHES = 2
USUAL_LOOPS, NEW_LOOPS, LOOPS_ON_RANKS, FIRST_SEED, PROCESSES = 1500, 90, 200, 10_000, 2

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="?", choices=("overhead", "simulated"), default="simulated")
    parser.add_argument("--small", action="store_true", help="seconds, to try the script")
    options = parser.parse_args()
    if options.case == "overhead":
        blocks, steps = (2, 5) if options.small else (BLOCKS, BLOCK_STEPS)
        torch.set_num_threads(1)
        pauses = (("between work", worker()), ("between sleeps", sleep))
        results = [overhead(name, pause, blocks, steps) for name, pause in pauses]
    else:
        counts = (6, 1, 1) if options.small else (USUAL_LOOPS, NEW_LOOPS, LOOPS_ON_RANKS)
        loops = loops_of(*counts, 0 if options.small else FIRST_SEED)
        results = summaries([*judge_all(loops, PROCESSES)])
    for entry in results:
        print(json.dumps(entry))
    if not options.small:
        write_result("stall-cpu" if options.case == "overhead" else "stall-simulated", results)


if __name__ == "__main__":
    main()
