"""Traces of a GPU: when they are taken, how Kineto's records are read, and lines that wait."""

import os
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stall.device import Device, TracerFaults
from tokenfeed.trainer.stall import StallMeter, kineto
from tokenfeed.trainer.stall.kineto import KinetoTracer, trace_of
from tokenfeed.trainer.stall.traces import Schedule, Trace, read_segments
from tokenfeed.trainer.stall.waits import lines_at

COMPUTE, COPIES = 7, 13
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"


@dataclass(slots=True)
class Record:
    """A record of Kineto, by its accessors."""

    kind: str
    label: str
    start: int
    duration: int
    stream: int = COMPUTE
    correlation: int = 0
    device: int = 0

    def activity_type(self) -> str:
        return self.kind

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def device_resource_id(self) -> int:
        return self.stream

    def correlation_id(self) -> int:
        return self.correlation

    def device_index(self) -> int:
        return self.device


class Records:
    """Records of a stream in nanoseconds: each kernel with its launch, which is 5 us earlier."""

    def __init__(self) -> None:
        self.all: list[Record] = []
        self.now = 1_795_914_511_041_060_842

    def kernel(self, name: str, duration: int, gap: int = 1000, *, lost: bool = False) -> None:
        self.now += gap
        number = len(self.all) + 1
        self.all.append(
            Record("cuda_runtime", "cudaLaunchKernel", self.now - 5000, 3000, 1, number)
        )
        if not lost:
            self.all.append(Record("kernel", name, self.now, duration, COMPUTE, number))
        self.now += duration

    def border(self) -> None:
        self.kernel(SPIN, 1500)

    def read(self, borders: int) -> tuple[Trace, float | None]:
        order = list(self.all)
        random.Random(3).shuffle(order)  # Kineto promises no order
        return trace_of(order, 0, borders)


def test_trace_is_read_from_records_of_kineto() -> None:
    records = Records()
    for _ in range(200):
        records.kernel(SPIN, 1300)
    records.border()
    for _ in range(100):
        records.kernel("gemm", 10_000)
    records.all.append(Record("gpu_memcpy", "Memcpy HtoD", records.now + 1000, 5000, COMPUTE))
    records.now += 6000
    records.kernel("late", 10_000, 201_000)
    records.border()
    records.kernel("of another", 4000)
    records.border()
    records.all.append(Record("kernel", "gemm", records.now, 10**9, COMPUTE, 9999, device=1))
    trace, small = records.read(3)
    assert small == pytest.approx(1.3e-6)
    assert np.isfinite(trace.borders).all()
    assert len(trace.lost) == 0
    segments = read_segments(trace, pause=1e-6)
    assert segments.span[0] == pytest.approx(100 * 11e-6 + 6e-6 + 211e-6 + 1e-6)
    assert segments.span[0] - segments.busy[0] == pytest.approx(200e-6)
    assert list(segments.kernels) == [102, 1]


def test_idle_time_in_a_trace_is_divided_by_what_the_device_waits_for() -> None:
    records = Records()
    records.border()
    records.kernel("gemm", 10_000)
    wait = Record("cuda_runtime", "cudaStreamSynchronize", records.now - 9000, 20_000, 1)
    records.kernel("after .item()", 10_000, 101_000)
    records.all += [wait, Record("cuda_runtime", "cudaMemcpyAsync", records.now - 9000, 9500, 1)]
    copy = Record("gpu_memcpy", "Memcpy HtoD", records.now, 41_000, COPIES)
    records.kernel("after a copy", 10_000, 41_000)
    name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    exchange = Record("kernel", name, records.now - 8000, 39_000, 20)
    records.kernel("after an exchange", 10_000, 31_000)
    records.kernel("late", 10_000, 71_000)
    records.border()
    records.all += [copy, exchange]
    segments = read_segments(records.read(2)[0], pause=1e-6)
    idle = segments.span[0] - segments.busy[0]
    assert idle == pytest.approx((100 + 40 + 30 + 70) * 1e-6)
    assert segments.waiting[0] == pytest.approx(100e-6)
    assert segments.copying[0] == pytest.approx(40e-6)
    assert segments.exchanging[0] == pytest.approx(30e-6)


def test_lost_kernels_and_borders_are_noticed() -> None:
    records = Records()
    for place in range(4):
        records.kernel(SPIN, 1500, lost=place == 0)  # the first kernels of a session get lost
        for number in range(50):
            records.kernel("gemm", 10_000, lost=place == 2 and number % 25 == 7)
    trace, _ = records.read(4)
    assert list(np.isnan(trace.borders[:, 0])) == [True, False, False, False]
    segments = read_segments(trace, pause=1e-6)
    assert np.isnan(segments.span[0])
    assert list(segments.lost[1:]) == [0, 2]
    assert segments.busy[2] == pytest.approx(50 * 11e-6, rel=0.005)


kernels = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), min_size=1, max_size=30)


@given(kernels, st.lists(st.integers(0, 400), min_size=2, max_size=6, unique=True))
def test_busy_time_of_any_kernels_is_that_of_an_oracle(
    rows: list[tuple[int, int]], places: list[int]
) -> None:
    """The oracle looks at each microsecond. Kernels of several streams overlap."""
    borders = np.array([(place, place + 1) for place in sorted(places)], float)
    table = np.array(sorted((start, start + length) for start, length in rows), float)
    trace = Trace(borders=borders, kernels=table, lost=np.array([], int))
    ran = {moment for start, length in rows for moment in range(start, start + length)}
    segments = read_segments(trace, pause=0.0)
    for place, (begin, end) in enumerate(zip(borders[:-1, 1], borders[1:, 0], strict=True)):
        if end < begin:
            continue
        busy = sum(moment in ran for moment in range(int(begin), int(end)))
        assert segments.busy[place] == pytest.approx(busy)


@given(st.integers(0, 30), st.floats(1e-3, 20.0), st.lists(st.floats(0.98, 1.02), min_size=2))
def test_ranks_trace_the_same_steps_although_their_clocks_differ(
    first: int, step_seconds: float, clocks: list[float]
) -> None:
    schedules = [Schedule(first, 12.0, 20.0) for _ in clocks]
    for _ in range(80):
        nexts = []
        for schedule, clock in zip(schedules, clocks, strict=True):
            before = schedule.next
            schedule.traced(before + 3, step_seconds * clock, 0.1 * clock)
            nexts.append(schedule.next)
            assert schedule.next > before + 3
        largest = max(schedule.distance for schedule in schedules)
        for schedule in schedules:  # as `gather` does
            if schedule.distance < largest:
                before = schedule.next
                schedule.distance = largest
                schedule.plan(first + 3)
        assert len({schedule.distance for schedule in schedules}) == 1


def test_traces_are_seconds_apart_and_rarer_in_a_long_run() -> None:
    schedule, step_seconds = Schedule(15, 12.0, 20.0), 0.05
    taken = []
    while schedule.next * step_seconds < 6 * 3600:
        taken.append(schedule.next * step_seconds)
        schedule.traced(schedule.next + 3, step_seconds, 0.1)
    apart = np.diff(taken)
    assert apart.min() > 5.0
    assert sum(moment < 90 for moment in taken) >= 6
    assert len(taken) * 0.1 < 0.003 * 6 * 3600
    rest = apart[5:] / np.array(taken[5:-1])
    assert rest.max() < 0.6, "the time after the latest trace is a part of any run"
    assert len(taken) < 200, "the accounts keep all"


@pytest.mark.parametrize("every", [7, 16])
def test_schedule_aims_at_steps_that_are_unusual(every: int) -> None:
    schedule = Schedule(15, 12.0, 20.0)
    for _ in range(20):
        schedule.plan(schedule.next + 3, (every, 5))
        assert (schedule.next + 2) % every == 5


def of_cpu() -> Any:
    """A profile of this thread with stacks, whose `.item()` calls stand for waits."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, with_stack=True) as profiler:
        value = torch.ones(3)
        total = value.sum()
        total.item()
        float(helper(total))
    return profiler.profiler.kineto_results  # type: ignore[union-attr]


def helper(total: torch.Tensor) -> float:
    return total.item()


def test_lines_that_wait_are_those_of_the_program() -> None:
    results = of_cpu()
    moments = [
        event.start_ns()
        for event in results.events()
        if event.name() == "aten::_local_scalar_dense"
    ]
    first = of_cpu.__code__.co_firstlineno
    found = lines_at(results.experimental_event_tree(), moments)
    assert [line.rsplit(":")[-1] for line in found] == [
        str(first + 6),
        str(helper.__code__.co_firstlineno + 1),
    ]
    assert all(line.split(":")[0].endswith("test_traces.py") for line in found)
    assert lines_at(results.experimental_event_tree(), [0]) == []


@pytest.mark.parametrize(
    ("name", "is_wait"),
    [
        ("cudaStreamSynchronize", True),
        ("cudaDeviceSynchronize", True),
        ("cudaEventSynchronize", True),
        ("cudaMemcpy", True),
        ("cudaMemcpyAsync", False),
        ("cudaLaunchKernel", False),
        ("cudaEventRecord", False),
    ],
)
def test_calls_in_which_a_host_waits(name: str, is_wait: bool) -> None:
    assert kineto.is_wait(name) == is_wait


class Profile:
    """Stands for torch.profiler.profile."""

    made: ClassVar[list["Profile"]] = []
    seen: ClassVar[dict[str, str | None]] = {}

    def __init__(self, activities: Any) -> None:
        Profile.made.append(self)
        self.activities = activities

    def start(self) -> None:
        for name in ("TEARDOWN_CUPTI", "KINETO_LOG_LEVEL"):
            Profile.seen[name] = os.environ.get(name)

    def stop(self) -> None:
        Profile.seen["at the stop"] = os.environ.get("TEARDOWN_CUPTI")
        records = Records()
        for _ in range(200):
            records.kernel(SPIN, 1300)
        for _ in range(3):
            records.border()
            records.kernel("gemm", 10_000)
        self.profiler = SimpleNamespace(
            kineto_results=SimpleNamespace(events=lambda: records.all[:-2])
        )


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> KinetoTracer:
    """A tracer of a GPU in name only: it queues nothing."""
    Profile.made, Profile.seen = [], {}

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            assert stream == "stream"

        def elapsed_time(self, later: "Event") -> float:
            return 200 * 2.3e-3  # milliseconds

    class Nothing:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: Nothing())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    activities = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: activities)
    for name in ("TEARDOWN_CUPTI", "KINETO_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    return KinetoTracer(torch.device("cuda:0"))


def test_trace_detaches_cupti_and_leaves_the_environment_as_it_was(tracer: KinetoTracer) -> None:
    before = dict(os.environ)
    assert tracer.why_not() is None
    tracer.start()
    for _ in range(3):
        tracer.border()
    trace = tracer.stop()
    assert Profile.made[0].activities == [torch.profiler.ProfilerActivity.CUDA]
    assert Profile.seen == {
        "TEARDOWN_CUPTI": "1",
        "KINETO_LOG_LEVEL": "99",
        "at the stop": "1",
    }
    assert dict(os.environ) == before
    assert trace.pause == pytest.approx(1e-6)
    assert len(trace.borders) == 3


@pytest.mark.parametrize(("cuda", "chosen", "seen"), [("12.4", None, None), ("13.0", "0", "0")])
def test_cupti_stays_attached_where_detaching_fails_or_the_user_says_so(
    tracer: KinetoTracer,
    monkeypatch: pytest.MonkeyPatch,
    cuda: str,
    chosen: str | None,
    seen: str | None,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if chosen is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", chosen)
    tracer.start()
    tracer.stop()
    assert Profile.seen["TEARDOWN_CUPTI"] == seen
    assert os.environ.get("TEARDOWN_CUPTI") == chosen


def test_no_trace_is_taken_beside_a_profiler_or_cuda_graphs(
    tracer: KinetoTracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Profile(activities=None)
    assert tracer.why_not() == "the program has a profiler of its own"
    del theirs
    Profile.made.clear()

    class Graph:
        pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    graph = [Graph()]
    assert tracer.why_not() == "the program uses CUDA graphs (set TEARDOWN_CUPTI=0 to trace it)"
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    assert tracer.why_not() is None
    monkeypatch.delenv("TEARDOWN_CUPTI")
    graph.clear()
    assert tracer.why_not() is None
    monkeypatch.setattr(torch.autograd, "_profiler_enabled", lambda: True)
    assert tracer.why_not() == "a profiler of the program is on"


def test_failed_start_leaves_the_environment_as_it_was(
    tracer: KinetoTracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(profile: Profile) -> None:
        raise RuntimeError("CUPTI")

    monkeypatch.setattr(Profile, "start", fail)
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="CUPTI"):
        tracer.start()
    assert dict(os.environ) == before


def test_find_waits_counts_lines_in_steps_that_are_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU stands for the GPU: its records of `.item()` stand for those of CUDA's wait."""
    monkeypatch.setattr(kineto, "is_wait", lambda name: name == "aten::_local_scalar_dense")
    monkeypatch.setattr("tokenfeed.trainer.stall.waits.is_wait", kineto.is_wait)
    monkeypatch.setattr("tokenfeed.trainer.stall.waits.CALLS", "cpu_op")
    device = Device(launch=8e-6)
    device.faults = TracerFaults(usual_seconds=1.0)
    meter = StallMeter(clock=device, skipped_steps=1)
    total = torch.ones(())
    for step in range(8):
        if step == 3:
            meter.find_waits(2)
        for _ in range(3):
            total.item()
        device.kernels(10, 1e-4)
        meter.step(1)
    device.wait()
    report = meter.report()
    meter.close()
    line = test_find_waits_counts_lines_in_steps_that_are_not_measured.__code__.co_firstlineno
    where, count = next(iter(report.events["waits"].items()))
    assert where.endswith(f"test_traces.py:{line + 15}")
    assert 2.5 <= count <= 3.0  # a loaded machine may show one of six waits at another call
    assert report.steps == 7
    assert not torch.autograd.profiler._is_profiler_enabled


def test_find_waits_beside_another_profiler_logs_why_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device, why = Device(launch=8e-6), "a profiler of the program is on"
    device.faults = TracerFaults(usual_seconds=1.0, why_not=why)
    meter = StallMeter(clock=device)
    meter.find_waits()
    meter.close()
    assert caplog.messages == ["stall: cannot find waits: a profiler of the program is on"]
