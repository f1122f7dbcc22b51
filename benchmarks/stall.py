"""What does the stall meter cost, and is it right?

On the CPU, here: blocks of 50 steps with the meter and without, by turns; a step takes 20 ms, of
which the host sleeps most. What the meter costs is the difference in CPU seconds of the thread,
for the wall time of a shared machine varies by more than there is to measure. With --device cuda
also each fault of stall_case.py, as `make gpu` runs them.

usage: python benchmarks/stall.py [--device cpu|cuda] [--small]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol import summary, write_result
from stall_case import FAULTS

from tokenfeed.trainer import StallMeter

__all__ = ["overhead"]

STEP_SECONDS = 0.02
BLOCK_STEPS, BLOCKS = 50, 20
MICRO_BATCHES = 2

Step = Callable[[], None]


def bare_step() -> None:
    """As much as a host does in a step that a device works on for 20 ms."""
    for _ in range(MICRO_BATCHES):
        time.sleep(STEP_SECONDS / MICRO_BATCHES)


def metered_step(meter: StallMeter[Any]) -> Step:
    """The same with a meter: two batches, a step, and a progress line now and then."""
    feed = iter(meter.watch(iter(int, 1)))

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            next(feed)
            time.sleep(STEP_SECONDS / MICRO_BATCHES)
        meter.step(tokens=1000, slots=1024)

    return step


def cpu_seconds(step: Step, steps: int) -> float:
    """Of the thread, by step."""
    began = time.thread_time()
    for _ in range(steps):
        step()
    return (time.thread_time() - began) / steps


def overhead(blocks: int, steps: int) -> dict[str, Any]:
    """CPU seconds of the meter as a share of a step, over pairs of blocks."""
    metered = metered_step(StallMeter[Any]("cpu", skipped_steps=1))
    cpu_seconds(metered, steps)  # what is imported late, is
    pairs = [(cpu_seconds(bare_step, steps), cpu_seconds(metered, steps)) for _ in range(blocks)]
    shares = [100 * (with_meter - bare) / STEP_SECONDS for bare, with_meter in pairs]
    return {
        "case": "overhead on the CPU",
        "step_ms": 1e3 * STEP_SECONDS,
        "blocks": blocks,
        "steps_a_block": steps,
        "percent_of_a_step": summary(shares, 3),
        "microseconds_a_step": round(1e6 * statistics.median(b - a for a, b in pairs), 1),
    }


def fault(name: str, device: str, *, small: bool) -> dict[str, Any]:
    """One fault of stall_case.py."""
    script = Path(__file__).with_name("stall_case.py")
    command = [sys.executable, str(script), name, "--device", device, *["--small"] * small]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"case": name} | json.loads(said.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--small", action="store_true", help="seconds, to try the script")
    options = parser.parse_args()
    blocks, steps = (2, 5) if options.small else (BLOCKS, BLOCK_STEPS)
    results = [overhead(blocks, steps)]
    print(json.dumps(results[-1]), flush=True)
    for name in FAULTS if options.device == "cuda" else ():
        results.append(fault(name, options.device, small=options.small))
        print(json.dumps(results[-1]), flush=True)
    if not options.small:
        write_result(f"stall-{options.device}", results)


if __name__ == "__main__":
    main()
