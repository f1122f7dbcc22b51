"""benchmarks/gpu/stall_checks.py on a device and a tracer of which all is known."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.stall_checks import CHECKS, KERNELS, LENGTHS, SESSIONS
from tokenfeed.trainer.stall.traces import Trace

PAUSE = 1.3e-6
SECONDS = dict(zip(LENGTHS.values(), (2e-6, 1e-5, 4e-5), strict=True))


class FakeGpu:
    """A device that pauses between kernels, and a tracer that costs time and loses records."""

    def __init__(self, *, lost: int = 0, measured_pause: float | None = PAUSE) -> None:
        self.host = self.free = 5.0
        self.launch = 4e-6
        self.lost, self.measured_pause = lost, measured_pause
        self.traces = 0
        self.kernels: list[tuple[float, float]] = []
        self.borders: list[tuple[float, float]] = []

    def now(self) -> float:
        return self.host

    def sleep(self, seconds: float) -> None:
        self.host += seconds

    def wait(self) -> None:
        self.host = max(self.host, self.free)

    def run(self, seconds: float) -> tuple[float, float]:
        self.host += self.launch
        begin = max(self.host, self.free + PAUSE)
        self.free = begin + seconds
        return begin, self.free

    def queue(self, kernels: int, elements: int) -> None:
        self.kernels += [self.run(SECONDS[elements]) for _ in range(kernels)]

    def hold(self) -> None:
        self.run(10e-3)

    def event(self) -> Any:
        gpu, moment = self, max(self.free, self.host)

        def query() -> bool:
            gpu.host += 1e-6
            return gpu.host > moment + 3e-6

        def elapsed_time(later: Any) -> float:
            return (later.moment - moment) * 1e3

        return SimpleNamespace(moment=moment, query=query, elapsed_time=elapsed_time)

    def tracer(self) -> Any:
        return self

    def start(self) -> None:
        self.host += 0.5 if self.traces == 0 else 0.03
        if self.traces == 0:
            self.launch += 0.4e-6
        self.traces += 1
        self.kernels, self.borders = [], []

    def border(self) -> None:
        self.borders.append(self.run(1e-6))

    def stop(self) -> Trace:
        self.wait()
        self.host += 1e-5 * len(self.kernels)
        kept = self.kernels[self.lost * (self.traces > 3) :]
        return Trace(
            borders=np.array(self.borders),
            kernels=np.array(kept),
            lost=np.zeros(0, np.intp),
            pause=self.measured_pause,
        )


def check(name: str, gpu: FakeGpu) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(CHECKS[name](gpu)))
    return found


def test_checks_find_what_is_known_of_the_device() -> None:
    pause = check("pause", FakeGpu())
    assert pause["worst_difference_us"] < 0.02
    assert all(row["kernels"] == KERNELS for row in pause["pause"].values())
    wrong = check("pause", FakeGpu(measured_pause=0.2e-6))
    assert wrong["worst_difference_us"] == pytest.approx(1.1, abs=0.02)
    assert check("pause", FakeGpu(measured_pause=None))["worst_difference_us"] is None

    rows = check("durations", FakeGpu())["durations"].values()
    for row, seconds in zip(rows, SECONDS.values(), strict=True):
        assert row["kernel_in_trace_us"] == pytest.approx(1e6 * seconds, abs=0.01)
        assert row["events_us"] == pytest.approx(1e6 * (seconds + PAUSE), rel=0.01)

    cost = check("cost", FakeGpu())
    assert cost["first_start_s"] == pytest.approx(0.5, abs=1e-3)
    assert cost["later_start_s"] == pytest.approx(0.03, abs=1e-3)
    assert cost["us_per_kernel"] == pytest.approx(10, rel=0.05)

    query = check("query", FakeGpu())
    assert 3 <= query["query_lag_us"] <= 5
    assert query["noise_us"] <= 2
    assert check("slowing", FakeGpu())["slower"] == pytest.approx(0.1, abs=0.01)


def test_lost_counts_each_session_and_names_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(lost=7)
    stop = gpu.stop

    def fail_once() -> Trace:
        trace = stop()
        if gpu.traces == 5:
            raise RuntimeError("CUPTI is taken")
        return trace

    monkeypatch.setattr(gpu, "stop", fail_once)
    found = check("lost", gpu)
    assert found["errors"] == ["CUPTI is taken"]
    assert found["lost_kernels"] == [0] * 3 + [7] * (SESSIONS - 4)
    assert found["lost_borders"] == [0] * (SESSIONS - 1)
