"""The stall meter as its callers meet it; test_stall_truth has its accounts beside the truth."""

import contextlib
import gc
import math
import random
import re
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.simulated_clocks import SimulatedClock
from support.stall_device import CudaOfDevices, Host, SimulatedDevice
from torch.utils.data import DataLoader

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.stall import CAUSES, StallMeter, StallReading, StallReport
from tokenfeed.trainer.stall.causes import Cause
from tokenfeed.trainer.stall.reading import StepSeconds, StepTimes
from tokenfeed.trainer.stall.watchers import MESSAGE, WaitFinder


def exact(**changes: Any) -> SimulatedDevice:
    """A device without noise and latency."""
    return SimulatedDevice(**{"noise": 0.0, "latency": 0.0, "launch": 0.0, "drift": 0.0} | changes)


def meter_of(device: SimulatedDevice, skipped_steps: int = 0) -> StallMeter:
    return StallMeter(clock=device, skipped_steps=skipped_steps, calibrate=False)


def simulate(
    *, steps: int = 20, data: float, kernels: float, log: float = 0.0, warmup_steps: int = 0
) -> tuple[SimulatedDevice, StallReading]:
    device = exact()
    meter = meter_of(device, warmup_steps)
    for _ in range(steps):
        with meter.cause("data"):
            device.host += data
        device.launch(kernels)
        meter.step(100)
        if log:
            with meter.cause("log"):
                device.wait()
                device.host += log
    device.wait()
    return device, meter.read()


def test_a_loader_faster_than_the_device_is_no_stall_however_long_the_host_waits() -> None:
    _, reading = simulate(steps=50, data=0.09, kernels=0.1)
    assert reading.cause_seconds["data"] == pytest.approx(
        0.09, rel=1e-3
    )  # the first found it empty
    _, steady = simulate(steps=50, data=0.09, kernels=0.1, warmup_steps=1)
    assert steady.fraction == pytest.approx(0.0, abs=1e-6)


def test_a_loader_slower_than_the_device_is_charged_exactly_the_idle_time() -> None:
    device, reading = simulate(data=0.15, kernels=0.1)
    assert reading.cause_seconds["data"] == pytest.approx(device.idle, rel=1e-3)
    _, steady = simulate(data=0.15, kernels=0.1, warmup_steps=1)
    assert steady.fraction == pytest.approx(1 / 3, abs=1e-3)


def test_who_lost_the_lead_of_the_host_pays_for_the_next_late_batch() -> None:
    _, with_log = simulate(data=0.05, kernels=0.1, log=0.02, warmup_steps=1)
    assert with_log.cause_seconds["data"] < 1e-3  # hidden, but for the log
    assert with_log.cause_seconds["log"] == pytest.approx(0.07 * 18 + 0.05, rel=0.1)
    _, without = simulate(data=0.05, kernels=0.1, warmup_steps=1)
    assert with_log.seconds - without.seconds == pytest.approx(
        with_log.cause_seconds["log"], rel=0.01
    )


def test_warmup_steps_are_left_out() -> None:
    device = exact()
    meter = meter_of(device, 1)
    for data in (100.0, 1.0, 1.0):
        with meter.cause("data"):
            device.host += data
        device.launch(1.0)
        device.wait()
        meter.step(7)
    reading = meter.read()
    assert (reading.steps, reading.tokens) == (2, 14)
    assert reading.seconds == pytest.approx(4.0, rel=1e-3)
    assert reading.fraction == pytest.approx(0.5, rel=1e-3)
    assert reading.tokens_per_s == pytest.approx(3.5, rel=1e-3)


def test_reading_and_reporting_never_wait_for_the_device() -> None:
    device = exact()
    meter = meter_of(device)
    device.launch(5.0)
    meter.step(1)
    before = device.host
    assert meter.read().steps == 0
    assert meter.report().stall is None
    assert device.host == before
    device.wait()
    assert meter.read().steps == 1


def test_a_bracket_that_ends_in_an_error_is_still_closed() -> None:
    device = exact()
    meter = meter_of(device)
    with contextlib.suppress(RuntimeError), meter.cause("checkpoint"):
        device.host += 3.0
        raise RuntimeError
    meter.step(1)
    device.wait()
    assert meter.read().cause_seconds["checkpoint"] == pytest.approx(3.0, rel=1e-3)


def test_of_nested_brackets_the_inner_one_counts() -> None:
    device = exact()
    meter = meter_of(device)
    with meter.cause("evaluation"):
        device.host += 1.0
        with meter.cause("log"):
            device.host += 2.0
        device.host += 3.0
    meter.step(1)
    device.wait()
    seconds = meter.read().cause_seconds
    assert (seconds["evaluation"], seconds["log"]) == pytest.approx((4.0, 2.0), rel=1e-3)


durations = st.floats(0.0, 2.0)


@given(st.lists(st.tuples(st.sampled_from(CAUSES), durations, durations, st.booleans())))
def test_causes_sum_to_the_total_and_to_no_more_than_wall_and_true_idle(
    steps: list[tuple[Cause, float, float, bool]],
) -> None:
    device = exact()
    meter = meter_of(device)
    began = device.done
    for cause, host_seconds, kernel_seconds, sync in steps:
        with meter.cause(cause):
            if sync:
                device.wait()
            device.host += host_seconds
        device.launch(kernel_seconds)
        meter.step(1)
    device.wait()
    reading = meter.read()
    assert reading.steps == len(steps)
    assert reading.seconds == pytest.approx(device.done - began, abs=1e-4)
    assert sum(reading.cause_seconds.values()) == pytest.approx(device.idle, abs=1e-3)
    assert reading.fraction == pytest.approx(sum(reading.cause_fractions.values()))
    assert 0.0 <= reading.fraction <= 1.0 + 1e-6


def test_the_difference_of_two_readings_is_the_time_between_them() -> None:
    device = exact()
    meter = meter_of(device)
    device.launch(1.0)
    device.wait()
    meter.step(10)
    first = meter.read()
    with meter.cause("evaluation"):
        device.host += 3.0
    device.launch(1.0)
    device.wait()
    meter.step(30)
    window = meter.read().since(first)
    assert (window.steps, window.tokens) == (1, 30)
    assert window.seconds == pytest.approx(4.0, rel=1e-3)
    assert window.cause_fractions["evaluation"] == pytest.approx(0.75, rel=1e-3)


def test_a_loader_is_watched_as_often_as_it_is_iterated_and_keeps_its_own_face() -> None:
    meter = StallMeter("cpu", skipped_steps=0)
    loader = DataLoader(list(range(12)), batch_size=3)  # type: ignore[arg-type]
    watched = meter.watch(loader)
    assert len(watched) == 4
    assert watched.batch_size == 3
    for _ in range(2):
        for batch in watched:
            meter.step(tokens=len(batch))
    report = meter.report()
    assert (report.steps, report.tokens) == (8, 24)
    assert report.causes["data"].seconds > 0


def test_on_the_cpu_parts_and_work_sum_to_the_wall_time(clock: SimulatedClock) -> None:
    meter = StallMeter("cpu", skipped_steps=0)
    for _ in range(5):
        with meter.cause("data"):
            clock.sleep(0.01)
        clock.sleep(0.03)
        meter.step(tokens=3, slots=4)
    report = meter.report()
    assert report.seconds == pytest.approx(0.2, abs=1e-4)
    assert report.causes["data"].seconds == pytest.approx(0.05, abs=1e-4)
    assert report.padding == 0.25
    assert not report.on_gpu
    assert report.mfu is None
    assert "CPU" in report.method


def test_a_full_collection_inside_the_work_is_charged_to_it_and_not_twice(
    clock: SimulatedClock,
) -> None:
    meter = StallMeter("cpu", skipped_steps=0)
    meter.step(1)
    gc.callbacks.append(lambda phase, _: clock.sleep(3.0 * (phase == "start")))
    with meter.cause("data"):
        clock.sleep(2.0)
        gc.collect()
    gc.callbacks.pop()
    meter.step(1)
    seconds = meter.read().cause_seconds
    assert seconds["garbage collection"] == pytest.approx(3.0, abs=1e-3)
    assert seconds["data"] == pytest.approx(2.0, abs=1e-3)
    meter.close()


def test_collection_in_forked_child_sets_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    device = exact()
    meter = meter_of(device)
    gc.collect()
    before = device.host
    monkeypatch.setattr("os.getpid", lambda: 1)
    gc.collect()
    assert device.host == before, "a mark takes time of the host"
    meter.close()


def test_marks_on_two_streams_give_no_negative_time() -> None:
    device = exact()
    passes = iter([0.0, 1.0, 3.0, 2.0, 4.0])
    device.mark = lambda: (7.0 + next(passes), device.host, device.host)  # type: ignore[method-assign]
    meter = meter_of(device)
    meter.step(1)
    with meter.cause("data"):
        pass
    meter.step(1)
    device.host += 9.0
    reading = meter.read()
    assert all(idle >= 0 for idle in reading.gaps.values())
    assert reading.seconds == pytest.approx(4.0, abs=1e-3)
    meter.close()


def test_a_meter_that_nothing_refers_to_no_longer_watches() -> None:
    before = list(gc.callbacks)
    meter = StallMeter("cpu")
    assert len(gc.callbacks) == len(before) + 1
    del meter
    assert gc.callbacks == before


def test_lines_that_wait_are_counted_and_other_warnings_pass_even_where_they_are_errors() -> None:
    finder = WaitFinder()
    finder.begin(2)
    for _ in range(2):
        for _ in range(3):
            warnings.warn(f"{MESSAGE} (...)", stacklevel=1)
        finder.end_step()
    (line, count), *rest = finder.found().items()
    assert line.startswith(f"{__file__}:")
    assert (count, rest) == (3.0, [])
    assert not finder.is_looking
    with pytest.raises(UserWarning, match="another"):  # the tests' own filter is back
        warnings.warn("another", stacklevel=1)


Item = Callable[[SimulatedDevice], None]
"""Waits for the device, as `Tensor.item` does."""


@pytest.fixture
def item(monkeypatch: pytest.MonkeyPatch) -> Iterator[Item]:
    """Let the meter look for waits."""
    mode: Any = "default"

    def set_mode(new: Any) -> None:
        nonlocal mode
        mode = new

    def item(device: SimulatedDevice) -> None:
        """Wait, then warn, as torch does. No profile function sees the inside of C++."""
        before = sys.getprofile()
        sys.setprofile(None)
        device.wait()
        if mode == "warn":
            warnings.warn(MESSAGE, stacklevel=2)
        sys.setprofile(before)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    profile = sys.getprofile()
    yield item
    assert mode == "default"
    assert sys.getprofile() == profile


def shares(device: SimulatedDevice, step: Callable[[], None], steps: int) -> StallReport:
    """Train, and check that the interval contains the true share of idle time."""
    meter = StallMeter(clock=device, skipped_steps=10)
    idle = began = 0.0
    for number in range(steps + 10):
        if number == 10:
            idle, began = device.idle, device.host
        with meter.cause("data"):
            pass
        step()
        meter.step(1)
    true = (device.idle - idle) / (device.host - began)
    device.wait()
    report = meter.report()
    assert report.interval is not None
    assert report.interval[0] <= true + 0.002, (report.interval, true)
    assert report.interval[1] >= true - 0.002, (report.interval, true)
    return report


@pytest.mark.parametrize("kernel_seconds", [1.2e-6, 15e-6])
def test_a_step_of_more_kernels_than_the_queue_holds_is_idle_by_a_lower_bound(
    item: Item, kernel_seconds: float
) -> None:
    device = SimulatedDevice(launch=20e-6)  # 1,420 kernels, as in 200 layers
    report = shares(device, lambda: device.work(1420, kernel_seconds), steps=150)
    assert report.stall is not None
    assert report.stall > 0.2
    assert report.causes["launch"].fraction > 0.2


@dataclass(frozen=True)
class Waiting:
    """A loop of 400 kernels a step that waits in the middle of its work."""

    waits: int
    kernel_seconds: float
    launch_seconds: float
    sleep: float
    """Host seconds after each wait."""
    varied: bool
    """Whether batches have different sizes."""

    def run(self, item: Item | None, *, metered: bool = False) -> tuple[float, float, StallMeter]:
        """Return the true share of idle time, the seconds, and the meter. Without `item`, nothing
        waits."""
        device, draw = SimulatedDevice(launch=self.launch_seconds), random.Random(3)
        meter = StallMeter(clock=device, skipped_steps=10)
        for step in range(160):
            if step == 10:
                idle, began = device.idle, device.host
            device.random.seed(step)
            size = draw.uniform(0.5, 1.5) if self.varied else 1.0
            with meter.cause("data") if metered else contextlib.nullcontext():
                device.host += 50e-6
            for part in range(self.waits + 1):
                device.work(400 // (self.waits + 1), self.kernel_seconds * size)
                if part < self.waits:
                    if item is not None:
                        item(device)
                    device.host += self.sleep
            if metered:
                meter.step(int(1000 * size))
        seconds = device.host - began
        device.wait()
        return (device.idle - idle) / seconds, seconds, meter


@pytest.mark.parametrize("waits", [1, 2, 3, 4])
@pytest.mark.parametrize("kernel_seconds", [5e-6, 12e-6, 50e-6])
@pytest.mark.parametrize(("sleep", "varied"), [(0.0, True), (1e-3, True), (1e-3, False)])
def test_idle_time_after_waits_in_the_middle_of_a_step_is_found(
    item: Item, waits: int, kernel_seconds: float, sleep: float, varied: bool
) -> None:
    loop = Waiting(waits, kernel_seconds, 9e-6, sleep, varied)
    true, seconds, _ = loop.run(item)
    _, mended, _ = loop.run(None)
    report = loop.run(item, metered=True)[2].report()
    assert report.interval is not None
    low, high = report.interval
    assert low - 0.003 <= true <= high + 0.003
    assert high - low < 0.1
    predicted = report.causes["wait"].speed_up
    assert predicted == pytest.approx(seconds / mended, rel=0.12)
    assert report.events["waits"].popitem()[1] == waits


def test_loop_with_a_profile_function_of_its_own_keeps_it_and_has_a_bound(item: Item) -> None:
    def profile(*_: object) -> None:
        pass

    loop, before = Waiting(2, 12e-6, 9e-6, 1e-3, False), sys.getprofile()
    true, _, _ = loop.run(item)
    sys.setprofile(profile)
    try:
        report = loop.run(item, metered=True)[2].report()
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(before)
    assert report.interval is not None
    assert report.interval[0] <= true <= report.interval[1]
    (advice,) = (piece.text for piece in report.advice if piece.cause == "unseen")
    assert re.search(r"waits for the device in the middle of it, at .*:\d+ \(2 a step\)", advice)


def test_time_of_a_wait_is_that_of_the_call_that_waits() -> None:
    """The calls that handle a warning do not count, neither at a new line nor at a known one."""
    calls, found = 0, []

    def now() -> float:
        nonlocal calls
        calls += 1
        return calls

    class Listener:
        def waited(self, called: float | None) -> None:
            found.append(called)

    def wait() -> int:
        ahead = calls
        warnings.warn(MESSAGE, stacklevel=1)
        return ahead

    listener = Listener()
    finder = WaitFinder(weakref.WeakMethod(listener.waited), now)
    finder.begin(1)
    before = [wait() for _ in range(3)]
    finder.end_step()
    assert found == [number + 1 for number in before]


def test_error_that_leaves_an_examined_loop_restores_all_settings_at_once(item: Item) -> None:
    device, profile, show = exact(), sys.getprofile(), warnings.showwarning
    meter = StallMeter(clock=device, skipped_steps=0)

    def callback() -> None:
        """Begin as callbacks of other trainers do: their frames return before the next step."""
        meter.step(1)
        meter.find_waits(2)

    def train(steps: int) -> None:
        for number in range(4):
            item(device)
            with contextlib.suppress(KeyError):  # caught inside of the step: the step goes on
                raise KeyError
            if number == steps:
                raise ValueError("a failed step")
            callback()

    for steps in (1, 2):
        with pytest.raises(ValueError, match="a failed step"):
            train(steps)
        assert sys.getprofile() == profile
        assert warnings.showwarning is show
        assert torch.cuda.get_sync_debug_mode() == "default"
    train(4)
    assert sys.getprofile() != profile, "the loop may go on after an error"
    meter.close()
    assert sum(meter.report().events["waits"].values()) > 0


def test_report_within_the_first_examined_step_counts_its_waits(item: Item) -> None:
    device = exact()
    meter = StallMeter(clock=device, skipped_steps=0)
    meter.find_waits()
    item(device)
    (count,) = meter.report().events["waits"].values()
    meter.close()
    assert count == 1


def test_error_in_an_examined_step_leaves_no_profile_function_after_close() -> None:
    meter, before = StallMeter(clock=exact(), skipped_steps=0), sys.getprofile()
    meter.find_waits()
    with pytest.raises(ZeroDivisionError):
        1 / 0  # noqa: B018
    meter.close()
    assert sys.getprofile() == before


def test_collection_during_compilation_leaves_later_work_uncharged() -> None:
    def collect(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        gc.collect()
        return graph.forward

    compiled: Any = torch.compile(lambda x: x + 1, backend=collect)
    device = exact()
    meter = meter_of(device)
    meter.step(1)
    compiled(torch.ones(2))
    for _ in range(20):
        device.launch(0.1)
        meter.step(1)
    device.wait()
    report = meter.report()
    assert report.events["compilations"] == 1
    assert report.events["collections"] >= 1
    assert report.causes["recompilation"].seconds < 0.05


class TwoGpus:
    """A loop that keeps cuda:1 waiting for its launches, while cuda:0 is the current device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host = Host()
        self.devices = [SimulatedDevice(on=host, launch=9e-6) for _ in range(2)]
        self.cuda = CudaOfDevices(monkeypatch, self.devices)

    def train(self, steps: int, meter: StallMeter | None = None) -> None:
        device = self.devices[1]
        for _ in range(steps):
            with meter.cause("data") if meter else contextlib.nullcontext():
                device.host += 50e-6
            device.work(60, 5e-6)
            if meter:
                meter.step(1)
        device.wait()


def test_meter_on_second_gpu_measures_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = TwoGpus(monkeypatch)
    meter = StallMeter("cuda:1")
    loop.train(100, meter)
    report = meter.report()
    meter.close()
    device = loop.devices[1]
    device.idle, begun = 0.0, device.done
    loop.train(100)
    assert report.stall == pytest.approx(device.idle / (device.done - begun), abs=0.02)
    assert report.causes["launch"].fraction > 0.3
    assert loop.cuda.contexts == {1}, "a rank needs no context on the GPU of another"


def test_meter_marks_one_gpu_while_another_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = TwoGpus(monkeypatch)
    meter = StallMeter("cuda:1")
    for _ in range(5):
        loop.train(2, meter)
        with torch.cuda.device(torch.device("cuda:0")):
            loop.train(2, meter)
    loop.cuda.capturing = 0
    outer = meter.interrupt("garbage collection")
    assert outer is not None
    meter.resume(outer)
    loop.cuda.capturing = 1
    assert not meter.interrupt("garbage collection")
    meter.close()
    assert loop.cuda.contexts == {1}


def test_report_counts_retries_and_allocations_since_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimulatedDevice(on=Host(), launch=9e-6)
    CudaOfDevices(monkeypatch, [device])
    counts = {"num_device_alloc": 40, "num_alloc_retries": 7}
    reserved = {"all": {"allocated": 0, "freed": 0}}
    statistics = counts | {"reserved_bytes": reserved}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: statistics | counts)
    meter = StallMeter("cuda:0", skipped_steps=1)
    for step in range(30):
        device.work(60, 0.2e-3)
        if step in (10, 20, 21):  # torch frees cached memory and tries again: the device stops
            counts["num_alloc_retries"] += 1
            counts["num_device_alloc"] += 2
            device.wait()
            device.host += 30e-3
        meter.step(1)
    device.wait()
    report = meter.report()
    meter.close()
    assert report.events["allocation_retries"] == 3
    assert report.events["allocations"] == 6
    assert report.causes["allocator"].seconds == pytest.approx(3 * 30e-3, rel=0.1)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_sleeping_host_is_stall_only_while_the_queue_is_empty() -> None:
    busy_cycles = 400_000_000  # some 0.2 s on any recent GPU
    meter = StallMeter("cuda", skipped_steps=1, calibrate=False)
    for _ in range(4):
        torch.cuda._sleep(busy_cycles)
        with meter.cause("data"):
            time.sleep(0.02)  # hidden behind the kernel
        meter.step(1)
    torch.cuda.synchronize()
    hidden = meter.read()
    assert hidden.cause_seconds["data"] < 1e-3
    for _ in range(3):
        torch.cuda.synchronize()
        with meter.cause("log"):
            time.sleep(0.02)
        meter.step(1)
    torch.cuda.synchronize()
    assert meter.read().cause_seconds["log"] == pytest.approx(0.06, rel=0.2)


def test_steps_are_timed_since_somebody_asked() -> None:
    times = StepTimes()
    assert times.take() is None
    for seconds in (3.0, 1.0, 2.0):
        times.add(seconds)
    assert times.take() == StepSeconds(2.0, 3.0)
    times.add(5.0)
    assert times.take() == StepSeconds(5.0, 5.0)
    assert times.take() is None


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: m.step("x"), "`tokens`='x': expected a whole number"),
        (lambda m: m.step(1.5), "`tokens`=1.5: expected a whole number"),
        (lambda m: m.step(True), "`tokens`=True: expected a whole number"),
        (lambda m: m.step(torch.tensor(5)), "`tokens`=tensor(5): expected a whole number"),
        (lambda m: m.step(5, slots="8"), "`slots`='8': expected a whole number"),
        (lambda m: m.step(None), "`tokens`=None: expected a whole number"),
        (lambda m: m.step(-1), "`tokens`=-1: expected a whole number, at least 0"),
        (lambda m: m.step(5, slots=3), "`slots`=3: expected a whole number, at least 5"),
        (lambda m: m.cause("dta").__enter__(), "`cause('dta')`: expected one of data, copy"),
        (lambda m: m.charge("x"), "`charge('x')`: expected one of data"),
        (lambda m: m.enter(["x"]), "`enter(['x'])`: expected one of data"),
        (lambda m: m.find_waits(0), "`steps`=0: expected a whole number, at least 1"),
        (lambda m: m.find_waits("x"), "`steps`='x': expected a whole number"),
        (lambda m: StallMeter("cpu", skipped_steps="x"), "`skipped_steps`='x': expected a whole"),
        (lambda m: StallMeter("cpu", devices=0), "`devices`=0: expected a whole number, at least"),
        (lambda m: StallMeter("cpu", skipped_steps=-1), "`skipped_steps`=-1: expected a whole"),
        (lambda m: StallMeter("cpu", devices=1.5), "`devices`=1.5: expected a whole number"),
        (
            lambda m: StallMeter("cpu", operations_per_token="6N"),
            "`operations_per_token`='6N': expected a finite number above 0",
        ),
        (
            lambda m: StallMeter("cpu", operations_per_token=math.inf),
            "`operations_per_token`=inf: expected a finite number above 0",
        ),
        (lambda m: StallMeter("cpu", remedies={"dta": "x"}), "`remedies` has 'dta': expected"),
    ],
)
def test_what_a_meter_cannot_take_is_refused_in_one_line_and_changes_nothing(
    call: Callable[[Any], object], said: str
) -> None:
    device = exact()
    meter = meter_of(device)
    with pytest.raises(ConfigError) as error:
        call(meter)
    assert str(error.value).startswith(said)
    device.launch(0.1)
    meter.step(np.int64(3), slots=np.uint16(4))  # type: ignore[arg-type]
    device.wait()
    assert (meter.read().tokens, meter.read().slots) == (3, 4)
