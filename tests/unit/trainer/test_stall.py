"""The stall meter, against a simulated GPU whose true idle time is known."""

import contextlib
import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.trainer.stall import CAUSES, EventClock, HostClock, StallMeter, StallReading


class SimulatedGpu:
    """A first-in-first-out queue of kernels beside a host, each with its own time in seconds.

    It is a `Clock`: a mark is the device time at which the queue reaches it.
    """

    method = "simulated"

    def __init__(self) -> None:
        self.host = 0.0
        self.device = 0.0
        self.idle = 0.0

    def launch(self, seconds: float) -> None:
        self.idle += max(0.0, self.host - self.device)
        self.device = max(self.device, self.host) + seconds

    def wait(self) -> None:
        self.host = max(self.host, self.device)

    def mark(self) -> float:
        self.launch(0.0)
        return self.device

    def passed(self, mark: float) -> bool:
        return mark <= self.host

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier

    def recycle(self, mark: float) -> None:
        pass


def simulate(
    *, steps: int = 20, data: float, kernels: float, log: float = 0.0, warmup_steps: int = 0
) -> tuple[SimulatedGpu, StallReading]:
    gpu = SimulatedGpu()
    meter = StallMeter(gpu, warmup_steps)
    for _ in range(steps):
        with meter.cause("data"):
            gpu.host += data
        gpu.host += 1e-5
        gpu.launch(kernels)
        meter.mark_step(100)
        if log:
            with meter.cause("log"):
                gpu.wait()
                gpu.host += log
    gpu.wait()
    return gpu, meter.read()


def test_a_loader_faster_than_the_gpu_is_no_stall_however_long_the_host_waits() -> None:
    _, reading = simulate(steps=50, data=0.09, kernels=0.1)
    assert reading.cause_seconds["data"] == pytest.approx(0.09)  # the first step found it empty
    _, steady = simulate(steps=50, data=0.09, kernels=0.1, warmup_steps=1)
    assert steady.fraction == 0.0


def test_a_loader_slower_than_the_gpu_is_charged_exactly_the_idle_time() -> None:
    gpu, reading = simulate(data=0.15, kernels=0.1)
    assert reading.cause_seconds["data"] == pytest.approx(gpu.idle, rel=1e-3)
    _, steady = simulate(data=0.15, kernels=0.1, warmup_steps=1)
    assert steady.fraction == pytest.approx(1 / 3, abs=1e-3)


def test_waiting_for_the_loss_is_no_stall_but_what_follows_it_is() -> None:
    _, reading = simulate(data=0.0, kernels=0.1, log=0.02)
    assert reading.cause_seconds["log"] == pytest.approx(0.02 * 19)  # the last log ends no step
    assert reading.cause_seconds["data"] == 0.0


def test_warmup_steps_are_left_out() -> None:
    gpu = SimulatedGpu()
    meter = StallMeter(gpu, 1)
    for data in (100.0, 1.0, 1.0):
        with meter.cause("data"):
            gpu.host += data
        gpu.launch(1.0)
        gpu.wait()
        meter.mark_step(7)
    reading = meter.read()
    assert (reading.steps, reading.tokens) == (2, 14)
    assert reading.seconds == pytest.approx(4.0)
    assert reading.fraction == pytest.approx(0.5)
    assert reading.tokens_per_s == pytest.approx(3.5)


def test_reading_never_waits_for_the_device() -> None:
    gpu = SimulatedGpu()
    meter = StallMeter(gpu, 0)
    gpu.launch(5.0)
    meter.mark_step(1)
    assert meter.read().steps == 0
    assert gpu.host == 0.0
    gpu.wait()
    assert meter.read().steps == 1


def test_a_bracket_that_ends_in_an_error_is_still_closed() -> None:
    gpu = SimulatedGpu()
    meter = StallMeter(gpu, 0)
    with contextlib.suppress(RuntimeError), meter.cause("checkpoint"):
        gpu.host += 3.0
        raise RuntimeError
    meter.mark_step(1)
    gpu.wait()
    assert meter.read().cause_seconds["checkpoint"] == pytest.approx(3.0)


durations = st.floats(0.0, 2.0)


@given(st.lists(st.tuples(st.sampled_from(CAUSES), durations, durations, st.booleans())))
def test_causes_sum_to_the_total_and_to_no_more_than_wall_and_true_idle(
    steps: list[tuple[str, float, float, bool]],
) -> None:
    gpu = SimulatedGpu()
    meter = StallMeter(gpu, 0)
    for cause, host_seconds, kernel_seconds, sync in steps:
        with meter.cause(cause):  # type: ignore[arg-type]
            if sync:
                gpu.wait()
            gpu.host += host_seconds
        gpu.launch(kernel_seconds)
        meter.mark_step(1)
    gpu.wait()
    reading = meter.read()
    assert reading.steps == len(steps)
    assert reading.seconds == pytest.approx(gpu.device)
    assert sum(reading.cause_seconds.values()) == pytest.approx(gpu.idle)
    assert math.isclose(reading.fraction, sum(reading.cause_fractions.values()))
    assert 0.0 <= reading.fraction <= 1.0 + 1e-9


def test_the_difference_of_two_readings_is_the_time_between_them() -> None:
    gpu = SimulatedGpu()
    meter = StallMeter(gpu, 0)
    gpu.launch(1.0)
    gpu.wait()
    meter.mark_step(10)
    first = meter.read()
    with meter.cause("evaluation"):
        gpu.host += 3.0
    gpu.launch(1.0)
    gpu.wait()
    meter.mark_step(30)
    window = meter.read().since(first)
    assert (window.steps, window.tokens, window.seconds) == (1, 30, pytest.approx(4.0))
    assert window.cause_fractions["evaluation"] == pytest.approx(0.75)


def test_the_host_clock_charges_a_bracket_its_own_seconds() -> None:
    meter = StallMeter(HostClock(), 0)
    with meter.cause("data"):
        time.sleep(0.05)
    time.sleep(0.05)
    meter.mark_step(1)
    reading = meter.read()
    assert reading.cause_seconds["data"] >= 0.05
    assert reading.seconds >= reading.cause_seconds["data"] + 0.05


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_sleeping_host_is_stall_only_while_the_queue_is_empty() -> None:
    busy_cycles = 400_000_000  # some 0.2 s on any recent GPU
    meter = StallMeter(EventClock(torch.device("cuda")), 1)
    for _ in range(4):
        torch.cuda._sleep(busy_cycles)
        with meter.cause("data"):
            time.sleep(0.02)  # hidden behind the kernel
        meter.mark_step(1)
    torch.cuda.synchronize()
    hidden = meter.read()
    assert hidden.cause_seconds["data"] < 1e-3
    for _ in range(3):
        torch.cuda.synchronize()
        with meter.cause("log"):
            time.sleep(0.02)
        meter.mark_step(1)
    torch.cuda.synchronize()
    assert meter.read().cause_seconds["log"] == pytest.approx(0.06, rel=0.2)
