"""StallMeter as its callers use it, on simulated devices and on the CPU."""

import copy
import ctypes
import gc
import math
import os
import re
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.simulated_clocks import SimulatedClock
from support.stall_device import CudaOfDevices
from torch.utils.data import DataLoader

from benchmarks.stall.device import Device, TracerFaults
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.stall import CAUSES, StallMeter, StallReport
from tokenfeed.trainer.stall.causes import Cause
from tokenfeed.trainer.stall.meter import peak_tflops


def exact() -> Device:
    """A device without noise, latency, pauses and tracer."""
    return Device(launch=0.0, pause=0.0, mark_seconds=2e-6, is_exact=True)


def meter_of(device: Device, skipped_steps: int = 0) -> StallMeter:
    return StallMeter(clock=device, skipped_steps=skipped_steps)


@pytest.mark.parametrize(("data", "stall"), [(0.09, 0.0), (0.15, 1 / 3)])
def test_time_of_a_loader_is_stall_as_far_as_the_device_idles(data: float, stall: float) -> None:
    """The first step finds the device empty, the others only if the loader is slower."""
    for skipped in (0, 1):
        device = exact()
        meter = meter_of(device, skipped)
        for _ in range(50):
            with meter.cause("data"):
                device.host += data
            device.kernels(1, 0.1)
            meter.step(7)
        assert meter.read().steps < 50, "reading does not wait for the device"
        device.wait()
        reading = meter.read()
        assert (reading.steps, reading.tokens) == (50 - skipped, 7 * (50 - skipped))
        idle = device.lost - skipped * data
        assert reading.cause_seconds["data"] == pytest.approx(idle, rel=1e-3, abs=1e-3)
    assert reading.fraction == pytest.approx(stall, abs=1e-3)
    assert reading.tokens_per_s == pytest.approx(7 / max(data, 0.1), rel=1e-3)


durations = st.floats(0.0, 2.0)


@given(st.lists(st.tuples(st.sampled_from(CAUSES), durations, durations, st.booleans())))
def test_causes_sum_to_the_total_and_to_no_more_than_wall_and_true_idle(
    steps: list[tuple[Cause, float, float, bool]],
) -> None:
    device = exact()
    meter = meter_of(device)
    began = device.free
    for cause, host_seconds, kernel_seconds, sync in steps:
        with meter.cause(cause):
            if sync:
                device.wait()
            device.host += host_seconds
        device.kernels(1, kernel_seconds)
        meter.step(1)
    device.wait()
    reading = meter.read()
    assert reading.steps == len(steps)
    assert reading.seconds == pytest.approx(device.free - began, abs=1e-4)
    assert sum(reading.cause_seconds.values()) == pytest.approx(device.lost, abs=1e-3)
    assert reading.fraction == pytest.approx(sum(reading.cause_fractions.values()))
    assert 0.0 <= reading.fraction <= 1.0 + 1e-6


def test_the_difference_of_two_readings_is_the_time_between_them() -> None:
    device = exact()
    meter = meter_of(device)
    device.kernels(1, 1.0)
    device.wait()
    meter.step(10)
    first = meter.read()
    with meter.cause("evaluation"):
        device.host += 3.0
    device.kernels(1, 1.0)
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


class Garbage:
    itself: "Garbage"


@pytest.mark.skipif(os.name != "posix", reason="Windows sends no signals")
def test_interruption_during_a_collection_of_the_meter_is_raised() -> None:
    """Python would drop it, if the callback of the meter were its next code."""
    meter = StallMeter("cpu", skipped_steps=0)
    gc.collect()  # what other tests have left may run code of Python when it is deleted
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kill = ctypes.CDLL(None).kill  # without any code of Python
    kill.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.py_object]
    garbage = Garbage()
    garbage.itself = garbage
    on_deletion = weakref.ref(garbage, partial(kill, os.getpid(), signal.SIGINT))
    del garbage
    with pytest.raises(KeyboardInterrupt):
        meter.collect()
    assert on_deletion() is None
    assert meter.phase != "garbage collection"
    assert gc.callbacks
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
    device.mark = lambda: 7.0 + next(passes)  # type: ignore[method-assign]
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


def traced(**faults: Any) -> Device:
    """A device of a slow host, with a tracer that has these faults."""
    device = Device(launch=25e-6)
    device.faults = TracerFaults(usual_seconds=1.0, **faults)
    return device


def train(device: Device, meter: StallMeter, steps: int, data: float = 1e-3) -> None:
    """Train steps of 300 kernels of 20 µs. Random loops with a known truth are in `test_idle`."""
    for _ in range(steps):
        with meter.cause("data"):
            device.host += data
        device.kernels(300, 20e-6)
        meter.step(1000)
    device.wait()


def report_of(device: Device, steps: int) -> StallReport:
    meter = StallMeter(clock=device)
    train(device, meter, steps)
    meter.close()
    return meter.report()


def test_without_a_tracer_the_gaps_are_the_figure_and_there_is_no_interval() -> None:
    report = report_of(Device(launch=25e-6), steps=100)
    assert report.unmeasured == "the device has no tracer"
    assert report.interval is None
    assert report.causes["launch"].fraction == 0.0
    assert report.stall is not None
    assert report.causes["data"].fraction == report.stall > 0.05
    assert "not measured: the device has no tracer" in str(report)


def test_of_a_device_that_a_host_is_always_ahead_of_no_trace_is_needed() -> None:
    device = Device(launch=5e-6)
    device.faults = TracerFaults(usual_seconds=1.0)
    report = report_of(device, steps=12)
    assert device.traces == 0
    assert report.at_most == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (
            {"error": RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")},
            "the tracer failed: CUPTI_ERROR_NOT_INITIALIZED",
        ),
        (
            {"loss": 0.2, "lost_borders": ()},
            r"3 traces in a row were void: the tracer loses \d\d% of the kernels",
        ),
        ({"lost_borders": (5, 9)}, "3 traces in a row were void: borders are missing"),
        ({"stretch": 1.03}, "3 traces in a row were void: steps take longer or shorter"),
    ],
)
def test_tracer_that_is_not_to_be_trusted_is_not_used_and_the_report_says_why(
    faults: dict[str, Any], reason: str
) -> None:
    device = traced(**faults)
    report = report_of(device, steps=600)
    assert report.unmeasured is not None
    assert re.search(reason, report.unmeasured)
    assert report.interval is None
    assert device.traces <= 3


def test_tracer_that_is_taken_by_the_program_is_used_once_it_is_free() -> None:
    why = "a profiler of the program is on"
    device = traced(why_not=why)
    assert device.faults is not None
    meter = StallMeter(clock=device)
    train(device, meter, 150)
    assert (meter.report().unmeasured, device.traces) == (why, 0)
    device.faults.why_not = None
    train(device, meter, 150)
    assert meter.report().unmeasured is None
    meter.close()


def test_copy_that_a_batch_waits_for_is_told_apart_from_a_late_batch() -> None:
    device = exact()
    meter = meter_of(device)
    for _ in range(20):
        with meter.cause("data"):
            device.host += 0.01
            device.copy(0.03)
        device.kernels(1, 0.1)
        device.wait()
        meter.step(1)
    seconds = meter.read().cause_seconds
    assert seconds["data"] == pytest.approx(20 * 0.01, rel=0.01)
    assert seconds["copy"] == pytest.approx(20 * 0.03, rel=0.01)
    meter.close()


def loop_on_cpu(clock: SimulatedClock, meter: StallMeter, steps: int, *, module: bool) -> None:
    """Fetch for 4 ms, and train for 16 ms, of which a quarter is before the forward pass."""
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda *_: clock.sleep(0.016))
    for _ in range(steps):
        clock.sleep(0.004)
        if module:
            layer(torch.ones(1, 2)).sum().backward()
        else:
            clock.sleep(0.016)
        meter.step(1)


def test_on_a_cpu_batches_of_a_generator_are_no_work(clock: SimulatedClock) -> None:
    meter = StallMeter("cpu", skipped_steps=2)
    loop_on_cpu(clock, meter, 20, module=True)
    report = meter.report()
    assert report.stall == pytest.approx(0.2, abs=1e-3)
    assert report.causes["other"].fraction == report.stall
    assert report.interval == pytest.approx((0.2, 0.2), abs=1e-3)
    assert report.unmeasured is None
    meter.close()


def test_on_a_cpu_without_a_module_there_is_no_interval(clock: SimulatedClock) -> None:
    meter = StallMeter("cpu", skipped_steps=2)
    loop_on_cpu(clock, meter, 20, module=False)
    report = meter.report()
    assert (report.stall, report.interval) == (0.0, None)
    assert report.unmeasured == "host code that no hook saw counts as work"
    assert report.unmeasured in str(report)
    meter.close()


def test_on_a_cpu_forward_passes_of_evaluations_and_of_data_begin_no_work(
    clock: SimulatedClock,
) -> None:
    meter = StallMeter("cpu", skipped_steps=1)
    trained, frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
    for _ in range(5):
        with meter.cause("evaluation"):
            trained(torch.ones(1, 2))
            clock.sleep(0.1)
        with torch.no_grad():
            trained(torch.ones(1, 2))
        frozen(torch.ones(1, 2))
        clock.sleep(0.2)
        trained(torch.ones(1, 2))
        clock.sleep(0.3)
        with meter.cause("log"):
            clock.sleep(0.1)
        clock.sleep(0.3)
        meter.step(1)
    shares = meter.report().causes
    assert [shares[name].fraction for name in ("evaluation", "other", "log")] == pytest.approx(
        [0.1, 0.2, 0.1], abs=1e-3
    )
    meter.close()


def state_of_process() -> list[Any]:
    """Everything of the process that a meter might change."""
    from torch.nn.modules import module

    return [
        list(warnings.filters),
        warnings.showwarning,
        sys.getprofile(),
        sys.gettrace(),
        threading.excepthook,
        [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)],
        *(
            dict(getattr(module, name))
            for name in dir(module)
            if name.startswith("_global_") and isinstance(getattr(module, name), dict)
        ),
        list(gc.callbacks),
        list(sys.meta_path),
        torch.nn.Module.__call__,
        torch.autograd.backward,
        torch.optim.Optimizer.step,
        dict(os.environ),
        torch.autograd.profiler._is_profiler_enabled,
    ]


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("ends", ["close", "delete"])
def test_process_after_a_meter_is_as_before(device: str, ends: str, clock: SimulatedClock) -> None:
    gc.collect()
    before = state_of_process()
    simulated = traced() if device == "simulated" else None
    meter = StallMeter("cpu", clock=simulated)
    if simulated is not None:
        train(simulated, meter, 40)
    loop_on_cpu(clock, meter, 5, module=True)
    during = state_of_process()
    changed = [place for place, (a, b) in enumerate(zip(before, during, strict=True)) if a != b]
    assert len(changed) == (1 if simulated else 2), "the callbacks of the collector, and the hook"
    if ends == "close":
        meter.close()
        assert state_of_process() == before
    del meter
    gc.collect()
    assert state_of_process() == before


def test_hook_of_a_meter_changes_no_module_and_no_other_thread(clock: SimulatedClock) -> None:
    meter = StallMeter("cpu", skipped_steps=0)
    layer = torch.nn.Linear(2, 2)
    before = {name: copy.copy(value) for name, value in vars(layer).items()}
    thread = threading.Thread(target=lambda: layer(torch.ones(1, 2)))
    clock.sleep(0.5)
    thread.start()
    thread.join()
    clock.sleep(0.5)
    layer(torch.ones(1, 2))
    clock.sleep(1.0)
    meter.step(1)
    assert meter.read().cause_seconds["other"] == pytest.approx(1.0, abs=1e-3)
    assert dict(vars(layer)) == before
    meter.close()


@pytest.mark.slow
def test_compiled_functions_compile_once_beside_a_meter() -> None:
    layer, count = torch.nn.Linear(2, 2), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        count.append(1)
        return graph.forward

    compiled = torch.compile(lambda x: layer(x).sum(), backend=backend, fullgraph=True)
    meter = StallMeter("cpu", skipped_steps=0)
    for _ in range(12):
        compiled(torch.ones(1, 2)).backward()
        meter.step(1)
    meter.close()
    assert len(count) <= 2
    assert compiled(torch.ones(1, 2)).isfinite()


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
        device.kernels(1, 0.1)
        meter.step(1)
    device.wait()
    report = meter.report()
    assert report.events["compilations"] == 1
    assert report.events["collections"] >= 1
    assert report.causes["recompilation"].seconds < 0.05


def test_meter_marks_its_gpu_while_another_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [traced(), traced()]
    cuda = CudaOfDevices(monkeypatch, devices)
    meter = StallMeter("cuda:1")
    for _ in range(20):
        train(devices[1], meter, 2)
        with torch.cuda.device(torch.device("cuda:0")):
            train(devices[1], meter, 2)
    report = meter.report()
    assert report.interval is not None
    assert report.interval[0] <= report.stall <= report.interval[1]  # type: ignore[operator]
    assert report.causes["launch"].fraction > 0.1
    cuda.capturing = 0
    outer = meter.interrupt("garbage collection")
    assert outer is not None
    meter.leave(outer)
    cuda.capturing = 1
    assert not meter.interrupt("garbage collection")
    meter.close()
    assert cuda.contexts == {1}, "a rank needs no context on the GPU of another"


def test_report_counts_retries_and_allocations_since_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(launch=9e-6)
    CudaOfDevices(monkeypatch, [device])
    counts = {"num_device_alloc": 40, "num_alloc_retries": 7}
    reserved = {"all": {"allocated": 0, "freed": 0}}
    statistics = counts | {"reserved_bytes": reserved}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: statistics | counts)
    meter = StallMeter("cuda:0", skipped_steps=1)
    for step in range(30):
        device.kernels(60, 0.2e-3)
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


def test_steps_are_timed_since_somebody_asked(clock: SimulatedClock) -> None:
    meter = StallMeter("cpu", skipped_steps=0)
    assert meter.latest_steps() is None
    for seconds in (3.0, 1.0, 2.0):
        clock.sleep(seconds)
        meter.step()
    found = meter.latest_steps()
    assert found is not None
    assert (found.p50, found.max) == pytest.approx((2.0, 3.0), abs=1e-3)
    assert meter.latest_steps() is None
    meter.close()


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
    device.kernels(1, 0.1)
    meter.step(np.int64(3), slots=np.uint16(4))  # type: ignore[arg-type]
    device.wait()
    assert (meter.read().tokens, meter.read().slots) == (3, 4)


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA A40", 149.7),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", 65),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A400", None),
        ("something else", None),
    ],
)
def test_a_gpu_that_is_there_has_a_speed_only_where_it_is_certain(
    device: str, tflops: float | None
) -> None:
    assert peak_tflops(device) == tflops
