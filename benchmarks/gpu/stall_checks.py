"""What the stall meter assumes of a GPU and of its tracer, measured on the GPU at hand.

- `pause`: the device's pause between two kernels of a full queue. The meter measures it with small
  kernels. It must be within 0.3 µs of (time by events - kernels in the trace) / number of kernels,
  for kernels of any length.
- `durations`: kernels in a trace against events without a trace.
- `cost`: host seconds to start a trace, to stop and read it, and the part of that for each kernel.
- `lost`: records lost in each of 20 traces of one process.
- `query`: microseconds from the end of an event until `query` returns True, at most.
- `slowing`: launches before and after the first trace of a process. benchmarks/gpu/ runs this one
  with TEARDOWN_CUPTI=1 and with 0.

It prints one line of JSON.

usage: stall_checks.py pause|durations|cost|lost|query|slowing
"""

import argparse
import json
import time
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch

from tokenfeed.trainer.stall.kineto import KinetoTracer
from tokenfeed.trainer.stall.traces import Trace, Tracer, read_segments

__all__ = ["CHECKS", "Gpu"]

Entry = dict[str, Any]

KERNELS = 600
"""Fewer than a queue holds."""
LENGTHS = {"2 us": 2**12, "10 us": 2**23, "40 us": 2**25}
"""Elements of a tensor to add 1 to, by about how long this takes on a large GPU."""
REPEATS = 5
SESSIONS = 20
SECONDS_BETWEEN_SESSIONS = 1.5
HELD_WIDTH = 6144
"""Of a product of matrices that takes 9 ms or more: the host queues all kernels meanwhile."""


class Gpu(Protocol):
    """A device with a queue."""

    def tracer(self) -> Tracer:
        """Return a tracer of the device's kernels."""

    def queue(self, kernels: int, elements: int) -> None:
        """Queue so many kernels of that size."""

    def hold(self) -> None:
        """Queue a long kernel, so that what follows is queued before it begins."""

    def event(self) -> Any:
        """Record an event."""

    def wait(self) -> None:
        """Wait until all that is queued is done."""

    def now(self) -> float:
        """Return the host time."""

    def sleep(self, seconds: float) -> None:
        """Let the host and the device rest."""


class CudaDevice:
    """The first GPU of torch."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", 0)
        self._tensors: dict[int, torch.Tensor] = {}
        self._wide = torch.zeros(HELD_WIDTH, HELD_WIDTH, device=self._device)
        self._product = torch.empty_like(self._wide)
        self.now, self.sleep, self.wait = time.perf_counter, time.sleep, torch.cuda.synchronize

    def tracer(self) -> Tracer:
        """Return the meter's own tracer."""
        return KinetoTracer(self._device)

    def queue(self, kernels: int, elements: int) -> None:
        """Add 1 to a tensor again and again."""
        if elements not in self._tensors:
            self._tensors[elements] = torch.zeros(elements, device=self._device)
        tensor = self._tensors[elements]
        for _ in range(kernels):
            tensor.add_(1)

    def hold(self) -> None:
        """Multiply large matrices. The kernel that spins would be taken for a border."""
        torch.mm(self._wide, self._wide, out=self._product)

    def event(self) -> Any:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def seconds_by_events(gpu: Gpu, kernels: int, elements: int) -> float:
    """Return the seconds of kernels in a full queue without a trace: the median of some tries."""
    found = []
    for _ in range(REPEATS):
        gpu.hold()
        first = gpu.event()
        gpu.queue(kernels, elements)
        last = gpu.event()
        gpu.wait()
        found.append(first.elapsed_time(last) / 1e3)
    return median(found)


def trace_of_kernels(gpu: Gpu, tracer: Tracer, kernels: int, elements: int) -> Trace:
    """Return a trace of kernels in a full queue, between two borders."""
    tracer.start()
    gpu.hold()
    tracer.border()
    gpu.queue(kernels, elements)
    tracer.border()
    return tracer.stop()


def union_of(trace: Trace) -> tuple[float, float, int]:
    """Return the seconds of kernels between the borders, the span, and the number of kernels."""
    segments = read_segments(trace, 0.0)
    return float(segments.busy[0]), float(segments.span[0]), round(segments.kernels[0])


def pause(gpu: Gpu) -> Entry:
    """Compare the pause that the meter measures with that of kernels of some lengths."""
    tracer, found = gpu.tracer(), {}
    for name, elements in LENGTHS.items():
        gpu.queue(KERNELS, elements)  # the first call of a kernel loads it
        gpu.wait()
        untraced = seconds_by_events(gpu, KERNELS, elements)
        trace = trace_of_kernels(gpu, tracer, KERNELS, elements)
        union, _, kernels = union_of(trace)
        found[name] = {
            "meter_us": None if trace.pause is None else round(1e6 * trace.pause, 3),
            "us": round(1e6 * (untraced - union) / KERNELS, 3),
            "kernels": kernels,
        }
        gpu.sleep(SECONDS_BETWEEN_SESSIONS)
    known = [each for each in found.values() if each["meter_us"] is not None]
    worst = max((abs(each["meter_us"] - each["us"]) for each in known), default=None)
    return {"pause": found, "worst_difference_us": worst}


def durations(gpu: Gpu) -> Entry:
    """Compare kernels in a trace, and their span, with events without a trace."""
    tracer, found = gpu.tracer(), {}
    for name, elements in LENGTHS.items():
        gpu.queue(KERNELS, elements)
        gpu.wait()
        untraced = seconds_by_events(gpu, KERNELS, elements)
        union, span, _ = union_of(trace_of_kernels(gpu, tracer, KERNELS, elements))
        found[name] = {
            "events_us": round(1e6 * untraced / KERNELS, 3),
            "kernel_in_trace_us": round(1e6 * union / KERNELS, 3),
            "span_in_trace_us": round(1e6 * span / KERNELS, 3),
        }
        gpu.sleep(SECONDS_BETWEEN_SESSIONS)
    return {"durations": found}


def cost(gpu: Gpu) -> Entry:
    """Time start and stop of traces with few and with many kernels."""
    tracer, rows = gpu.tracer(), []
    few, many = KERNELS, 20 * KERNELS
    for kernels in (few, many, few, many):
        began = gpu.now()
        tracer.start()
        started = gpu.now()
        tracer.border()
        gpu.queue(kernels, min(LENGTHS.values()))
        tracer.border()
        gpu.wait()
        queued = gpu.now()
        tracer.stop()
        rows.append((kernels, started - began, gpu.now() - queued))
        gpu.sleep(SECONDS_BETWEEN_SESSIONS)
    stops = {kernels: min(row[2] for row in rows if row[0] == kernels) for kernels in (few, many)}
    return {
        "first_start_s": round(rows[0][1], 4),
        "later_start_s": round(median(row[1] for row in rows[1:]), 4),
        "stop_s": {str(kernels): round(seconds, 4) for kernels, seconds in stops.items()},
        "us_per_kernel": round(1e6 * (stops[many] - stops[few]) / (many - few), 2),
    }


def lost(gpu: Gpu) -> Entry:
    """Count the records that each of several traces loses."""
    tracer, missing, borders, errors = gpu.tracer(), [], [], list[str]()
    for _ in range(SESSIONS):
        try:
            trace = trace_of_kernels(gpu, tracer, KERNELS, min(LENGTHS.values()))
        except RuntimeError as error:
            errors.append(str(error))
            continue
        borders.append(int(np.isnan(trace.borders[:, 0]).sum()))
        missing.append(KERNELS - union_of(trace)[2])
        gpu.sleep(SECONDS_BETWEEN_SESSIONS)
    return {"kernels": KERNELS, "lost_kernels": missing, "lost_borders": borders, "errors": errors}


def query(gpu: Gpu) -> Entry:
    """Time how late `query` sees that an event has passed.

    On an idle device, the time from before `record` to the first True is the lag and the way to the
    device. Behind a long kernel, two events that are some kernels apart are seen at some distance:
    it differs from their elapsed time by the lag's noise.
    """
    idle, noise = [], []
    for _ in range(20 * REPEATS):
        gpu.wait()
        began = gpu.now()
        seen(gpu, gpu.event())
        idle.append(gpu.now() - began)
    for _ in range(REPEATS):
        gpu.hold()
        first = gpu.event()
        gpu.queue(100, max(LENGTHS.values()))
        last = gpu.event()
        distance = -seen(gpu, first) + seen(gpu, last)
        noise.append(abs(distance - first.elapsed_time(last) / 1e3))
    return {"query_lag_us": round(1e6 * median(idle), 2), "noise_us": round(1e6 * max(noise), 2)}


def seen(gpu: Gpu, event: Any) -> float:
    """Return the host time at which `query` first returns True."""
    while not event.query():
        pass
    return gpu.now()


def slowing(gpu: Gpu) -> Entry:
    """Time launches before and after the first trace of the process."""

    def launch_us() -> float:
        found = []
        for _ in range(4 * REPEATS):
            gpu.wait()
            began = gpu.now()
            gpu.queue(KERNELS, min(LENGTHS.values()))
            found.append(gpu.now() - began)
        return 1e6 * median(found) / KERNELS

    launch_us()
    before = [launch_us() for _ in range(REPEATS)]
    trace_of_kernels(gpu, gpu.tracer(), KERNELS, min(LENGTHS.values()))
    gpu.sleep(SECONDS_BETWEEN_SESSIONS)
    after = [launch_us() for _ in range(REPEATS)]
    return {
        "launch_us_before": [round(each, 3) for each in before],
        "launch_us_after": [round(each, 3) for each in after],
        "slower": round(median(after) / median(before) - 1, 4),
    }


CHECKS = {
    "pause": pause,
    "durations": durations,
    "cost": cost,
    "lost": lost,
    "query": query,
    "slowing": slowing,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("data", nargs="?", help="not needed; the other cases are given it")
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--small", action="store_true", help="as data")
    parser.add_argument("--settings", help="as data")
    options = parser.parse_args()
    print(json.dumps(CHECKS[options.check](CudaDevice())))


if __name__ == "__main__":
    main()
