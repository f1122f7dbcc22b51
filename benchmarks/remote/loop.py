"""A loop that uses a batch in 20 ms, for every loader of benchmarks/remote/.

This file needs nothing: it runs where tokenfeed is not installed.
"""

import time
from collections.abc import Iterator
from typing import Any

__all__ = ["LOOP_STEPS", "STEP_S", "loop"]

STEP_S = 0.02
LOOP_STEPS = 400


def loop(batches: Iterator[Any], steps: int = LOOP_STEPS) -> dict[str, float]:
    """How long it waited for batches: the 99th percentile, and the longest."""
    waits = []
    for _ in range(steps):
        time.sleep(STEP_S)
        asked = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - asked)
    waits.sort()
    return {"wait_p99_ms": waits[int(0.99 * steps)] * 1000, "wait_most_ms": waits[-1] * 1000}
