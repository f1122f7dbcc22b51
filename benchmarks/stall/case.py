"""One fault in a training loop: what the meter reports of it, and what a full trace shows.

benchmarks/gpu/ starts this for each fault, and for each order in which a loop may fetch its
batches, and compares the gain that the meter predicts with the speed of the loop without a fault.
The loop runs with the meter first. Then the meter is closed, and torch's profiler records more
steps of the same loop: a profiler slows down what comes after it. The profiler also slows down the
launches, so a device that waits for them idles more in the trace. The time of the kernels does not
suffer. So the report has two figures of the trace: the idle share of its own time, and the idle
share if the same kernels fill steps as long as those without a trace.

It prints one line of JSON.

usage: case.py FAULT [DATA] [--device cuda] [--small]
"""

import argparse
import gc
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenfeed.trainer.stall import Cause, StallMeter, StallReport

__all__ = ["FAULTS", "LOOPS", "beside_trace", "busy_of_trace", "merged"]

Entry = dict[str, Any]
Interval = tuple[float, float]

FAULTS: dict[str, Cause] = {
    "none": "other",
    "slow loader": "data",
    "pageable copy": "data",
    "item": "wait",
    "slow log": "log",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "tiny kernels": "launch",
    "collector": "garbage collection",
    "allocator": "allocator",
    "recompilation": "recompilation",
}
"""What goes wrong, and where the meter should find it."""
LOOPS: dict[str, Cause] = {
    "fetched first": "data",
    "fetched late": "data",
    "fetched last": "data",
    "never bracketed": "launch",
}
"""Where a loop with a loader that is a little slower than its steps fetches the batch: before the
forward pass, after the backward pass, after the step, or where no meter sees it."""
WARMUP = 10
TINY_LAYERS = 200
PAUSE_MICROSECONDS = 1.0
"""A device with a full queue pauses about so long between two kernels."""
SLOWER_THAN_STEP = 1.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is done."""

    width: int
    layers: int
    rows: int
    seconds: float
    """With the meter: long enough for two of its traces."""
    traced_steps: int
    fault_seconds: float


LARGE = Scale(width=2048, layers=12, rows=8192, seconds=13, traced_steps=40, fault_seconds=0.02)
SMALL = Scale(width=32, layers=2, rows=16, seconds=0.5, traced_steps=20, fault_seconds=0.002)


class Loop:
    """A plain loop of torch, with one fault or none."""

    def __init__(self, fault: str, device: str, scale: Scale) -> None:
        tiny = fault == "tiny kernels"
        width, layers = (
            (64, TINY_LAYERS) if tiny and device == "cuda" else (scale.width, scale.layers)
        )
        self.fault, self.device, self.scale = fault, torch.device(device), scale
        self.rows, self.width = 64 if tiny else scale.rows, width
        stack = (torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model: Callable[..., torch.Tensor] = torch.nn.Sequential(*stack).to(
            self.device, self.dtype
        )
        self.optimizer = torch.optim.SGD(list(self.model.parameters()), lr=0.0, fused=True)  # type: ignore[attr-defined]
        if fault == "recompilation":
            self.model = torch.compile(self.model, dynamic=False)
        self.batch = torch.randn(self.rows, self.width, dtype=self.dtype)
        self.there = self.batch.to(self.device)
        self.ballast: list[Any] = []
        self.late_seconds = SLOWER_THAN_STEP * self.usual_seconds() if fault in LOOPS else 0.0
        self.meter = StallMeter(self.device, skipped_steps=WARMUP)

    def usual_seconds(self) -> float:
        """Return the seconds of a step without a fault."""
        for number in range(WARMUP):
            if number == WARMUP // 2:
                self.settle()
                began = time.perf_counter()
            self.work(self.there)
        self.settle()
        return (time.perf_counter() - began) / (WARMUP - WARMUP // 2)

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield batches on the device, as slowly as the fault has it."""
        there = self.there
        for step in itertools.count():
            if self.late_seconds:
                time.sleep(self.late_seconds)
            if self.fault == "slow loader":
                time.sleep(2 * self.scale.fault_seconds)
            if self.fault == "pageable copy":
                there = torch.cat([self.batch] * 4).to(self.device)[: self.rows]
            rows = max(1, self.rows - step // 40)
            yield there[:rows] if self.fault == "recompilation" else there

    def work(self, batch: torch.Tensor, between: Callable[[], object] = lambda: None) -> None:
        """Train a step of two micro-batches; `between` runs after the last backward pass."""
        for _ in range(2):
            loss = self.model(batch).square().mean()
            loss.backward()
            if self.fault == "item":
                loss.item()
                time.sleep(self.scale.fault_seconds / 10)  # what a host would hide
        between()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, feed: Iterator[torch.Tensor]) -> Iterator[int]:
        """Train a step for each number that is yielded."""
        batch = next(feed)

        def fetch() -> None:
            nonlocal batch
            batch = next(feed)

        for step in itertools.count():
            if step and self.fault not in ("fetched late", "fetched last"):
                fetch()
            self.work(batch, fetch if self.fault == "fetched late" else lambda: None)
            self.inside(step)
            if self.fault == "fetched last":
                fetch()
            yield step
            self.after(step)

    def run(self) -> StallReport:
        """Train with the meter; the report waits for the device once, at the end."""
        feed: Iterator[torch.Tensor] = self.batches()
        if self.fault != "never bracketed":
            feed = iter(self.meter.watch(feed))
        end = time.perf_counter() + self.scale.seconds
        for step in self.steps(feed):
            self.meter.step(tokens=self.rows)
            if time.perf_counter() > end and step > WARMUP + self.scale.traced_steps:
                break
        self.settle()
        report = self.meter.report()
        self.meter.close()
        return report

    def traced(self) -> tuple[list[Entry], int]:
        """Train under a profiler; return the events of the trace, and the number of steps."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        profiler = torch.profiler.profile(activities=activities, acc_events=True)
        for step in self.steps(self.batches()):
            if step == WARMUP - 1:
                self.settle()
                profiler.start()
            if step == WARMUP + self.scale.traced_steps - 1:
                break
        self.settle()
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events: list[Entry] = json.loads(path.read_text())["traceEvents"]
        return events, self.scale.traced_steps

    def inside(self, step: int) -> None:
        """What happens to the work of a step."""
        if self.fault == "collector" and step % 5 == 0:
            self.ballast = self.ballast or [[number] for number in range(3_000_000)]
            gc.collect()
        if self.fault == "allocator" and step % 5 == 0 and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def after(self, step: int) -> None:
        """What happens between steps."""
        seconds = self.scale.fault_seconds
        if self.fault == "slow log":
            with self.meter.cause("log"):
                self.settle()
                time.sleep(seconds / 4)
        if self.fault == "checkpoint" and step % 20 == 0:
            with self.meter.cause("checkpoint"), tempfile.TemporaryFile() as file:
                torch.save(
                    [weight.cpu() for weight in self.optimizer.param_groups[0]["params"]], file
                )
        if self.fault == "evaluation" and step % 20 == 0:
            with self.meter.cause("evaluation"):
                self.settle()
                time.sleep(5 * seconds)

    def settle(self) -> None:
        """Wait until all that was queued is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def merged(intervals: list[Interval]) -> list[Interval]:
    """The union of intervals, in order."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def busy_of_trace(events: list[Entry], pause: float) -> tuple[float, float]:
    """Return the microseconds in which kernels ran, and those from the first kernel to the last.

    Copies are no work. A kernel that only holds up the device is no time at all.

    Args:
        events: The events of a Chrome trace.
        pause: Microseconds that a device with a full queue takes from one kernel to the next.
            They count as busy.
    """
    kernels = [event for event in events if event.get("cat") == "kernel"]
    spun = sum(event["dur"] for event in kernels if "spin" in event["name"])
    union = merged([(event["ts"], event["ts"] + event["dur"]) for event in kernels])
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(union)]
    span = union[-1][1] - union[0][0] - spun
    return span - sum(gap - pause for gap in gaps if gap > pause), span


def measure(fault: str, device: str, scale: Scale) -> Entry:
    """Return the report of the meter, and what the trace shows."""
    loop = Loop(fault, device, scale)
    report = loop.run()
    causes = {name: part.fraction for name, part in report.causes.items() if part.seconds}
    expected = (FAULTS | LOOPS)[fault]
    found = {
        "loop": [loop.rows, loop.width],
        "steps": report.steps,
        "tokens_per_s": report.real_tokens_per_s,
        "stall": report.stall,
        "interval": report.interval,
        "unmeasured": report.unmeasured,
        "verdict": report.verdict,
        "causes": causes,
        "main_cause": max(causes, key=causes.__getitem__, default=None),
        "expected_cause": expected,
        "predicted_gain": report.causes[expected].speed_up,
    }
    if device == "cuda":  # a CPU has no kernels to trace
        found |= beside_trace(report, *loop.traced())
    return found


def beside_trace(report: StallReport, events: list[Entry], steps: int) -> Entry:
    """Return the idle share of a full trace, and that of the same kernels in untraced steps."""
    busy, span = busy_of_trace(events, PAUSE_MICROSECONDS)
    untraced = 1e6 * report.seconds / report.steps
    return {
        "trace_idle": 1 - busy / span,
        "trace_idle_at_usual_speed": 1 - busy / steps / untraced,
        "kernels_per_step": sum(event.get("cat") == "kernel" for event in events) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=[*FAULTS, *LOOPS])
    parser.add_argument("data", nargs="?", help="not needed; the other cases are given it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--settings", help="as data")
    options = parser.parse_args()
    scale = SMALL if options.small else LARGE
    print(json.dumps(measure(options.fault, options.device, scale)))


if __name__ == "__main__":
    main()
