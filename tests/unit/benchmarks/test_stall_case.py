"""What benchmarks/stall/case.py takes for idle in a trace, on traces made by hand."""

import itertools
import random

import pytest

from benchmarks.stall.case import idle_of_trace, merged


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


def test_idle_is_what_kernels_of_all_streams_leave_and_neither_copies_nor_spins_count() -> None:
    events = [
        kernel(0, 10),
        kernel(5, 20),  # of another stream
        kernel(20, 35, "Memcpy HtoD", "gpu_memcpy"),
        kernel(40, 60),
        kernel(60, 90, "spin_kernel"),
        kernel(90, 100),
    ]
    assert idle_of_trace(events) == pytest.approx(20 / 70)
