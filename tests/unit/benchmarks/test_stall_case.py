"""What benchmarks/stall/case.py takes for busy in a trace, on traces made by hand."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.stall.case import beside_trace, busy_of_trace, merged


def kernel(begin: float, end: float, name: str = "gemm", cat: str = "kernel") -> dict[str, object]:
    return {"ts": begin, "dur": end - begin, "name": name, "cat": cat}


def test_merged_intervals_cover_the_same_points_and_do_not_touch() -> None:
    draw = random.Random(1)
    for _ in range(50):
        starts = [draw.randrange(100) for _ in range(12)]
        intervals = [(float(at), float(at + draw.randrange(1, 12))) for at in starts]
        union = merged(intervals)
        covered = {point for begin, end in intervals for point in range(int(begin), int(end))}
        assert {p for begin, end in union for p in range(int(begin), int(end))} == covered
        assert all(first[1] < second[0] for first, second in itertools.pairwise(union))


def test_busy_time_counts_kernels_and_pauses_but_neither_copies_nor_spins() -> None:
    events = [
        kernel(0, 10),
        kernel(5, 20),  # of another stream
        kernel(20, 35, "Memcpy HtoD", "gpu_memcpy"),
        kernel(40, 60),
        kernel(60.5, 61),
        kernel(61, 91, "spin_kernel"),
        kernel(91, 101),
    ]
    assert busy_of_trace(events, 1.0) == pytest.approx((71 - 19, 71))
    assert busy_of_trace(events, 0.0) == pytest.approx((71 - 20.5, 71))


def test_kernels_of_a_slowed_trace_are_set_against_steps_without_a_trace() -> None:
    events: list[dict[str, Any]] = [kernel(100 * at, 100 * at + 40) for at in range(10)]
    report: Any = SimpleNamespace(seconds=2 * 80e-6, steps=2)  # without the trace 80 µs a step
    found = beside_trace(report, events, 10)
    assert found["trace_idle"] == pytest.approx(9 * 59 / 940)
    assert found["trace_idle_at_usual_speed"] == pytest.approx(1 - 409 / 800)
    assert found["kernels_per_step"] == 1
