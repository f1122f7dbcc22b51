"""One fault in a training loop: what the meter says of it, and what a trace says.

benchmarks/gpu/ starts this for each fault, and compares the gain that the meter predicts with the
speed of the loop without a fault. Each run is a process of its own, for a profiler slows whatever
comes after it: `metered` is not profiled. `traced` runs meter and profiler together, and compares
both over the same steps: idle is what the merged intervals of kernels leave.

It prints one line of JSON.

usage: case.py FAULT [DATA] [--device cuda] [--small] [--run metered|traced]
"""

import argparse
import gc
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tokenfeed.trainer.stall import Cause, StallMeter, StallReport

__all__ = ["FAULTS", "idle_of_trace", "merged"]

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
RUNS = ("metered", "traced")
WARMUP = 10
TINY_STEPS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is done."""

    width: int
    layers: int
    rows: int
    steps: int
    fault_seconds: float


LARGE = Scale(width=2048, layers=12, rows=8192, steps=200, fault_seconds=0.02)
SMALL = Scale(width=32, layers=2, rows=16, steps=30, fault_seconds=0.002)


class Loop:
    """A plain loop of torch, with one fault or none."""

    def __init__(self, fault: str, device: str, scale: Scale) -> None:
        tiny = fault == "tiny kernels"
        if tiny:
            scale = replace(scale, steps=min(scale.steps, TINY_STEPS))
        width, layers = (64, 200) if tiny and device == "cuda" else (scale.width, scale.layers)
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
        self.meter = StallMeter(self.device, skipped_steps=WARMUP)
        self.ballast: list[Any] = []

    def batches(self) -> Iterator[torch.Tensor]:
        """On the device, made ahead of what is timed; as slow as the fault has it."""
        batch = torch.randn(self.rows, self.width, dtype=self.dtype)
        there = batch.to(self.device)
        for step in range(self.scale.steps + WARMUP):
            if self.fault == "slow loader":
                time.sleep(2 * self.scale.fault_seconds)
            if self.fault == "pageable copy":
                there = torch.cat([batch] * 4).to(self.device)[: self.rows]
            yield there[: self.rows - step // 40] if self.fault == "recompilation" else there

    def run(self) -> StallReport:
        """Train; the report waits for the device once, at the end."""
        for step, batch in enumerate(self.meter.watch(self.batches())):
            for _ in range(2):
                loss = self.model(batch).square().mean()
                loss.backward()
                if self.fault == "item":
                    loss.item()
                    time.sleep(self.scale.fault_seconds / 10)  # what a host would hide
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.inside(step)
            self.meter.step(tokens=batch.shape[0])
            self.after(step)
        self.settle()
        return self.meter.report()

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


def idle_of_trace(events: list[Entry], least: float = 0.0) -> float:
    """Share of the time from the first kernel to the last in which none ran, by a Chrome trace;
    copies are no work, and what only held the device up is no time at all.

    Args:
        events: The events of the trace.
        least: Microseconds: shorter gaps do not count. A device whose queue is full takes a few
            microseconds from one kernel to the next, more under a profiler.
    """
    kernels = [event for event in events if event.get("cat") == "kernel"]
    spun = sum(event["dur"] for event in kernels if "spin" in event["name"])
    union = merged([(event["ts"], event["ts"] + event["dur"]) for event in kernels])
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(union)]
    return sum(gap for gap in gaps if gap > least) / (union[-1][1] - union[0][0] - spun)


def traced(loop: Loop) -> Entry:
    """Meter and profiler over the same steps; only those after the warm-up are profiled."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=activities, acc_events=True)
    after = loop.after

    def begin(step: int) -> None:
        if step == WARMUP - 1:
            loop.settle()
            profiler.start()
        after(step)

    loop.after = begin  # type: ignore[method-assign]
    report = loop.run()
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return {
        "stall": report.stall,
        "trace_idle": idle_of_trace(events),
        "trace_idle_in_gaps_over_10_us": idle_of_trace(events, 10.0),
    }


def one_run(fault: str, device: str, scale: Scale, run: str) -> Entry:
    """What one process measures."""
    loop = Loop(fault, device, scale)
    if run == "traced":
        return traced(loop)
    report = loop.run()
    causes = {name: part.fraction for name, part in report.causes.items() if part.seconds}
    return {
        "loop": [loop.rows, loop.width],
        "tokens_per_s": report.real_tokens_per_s,
        "stall": report.stall,
        "interval": report.interval,
        "is_lower_bound": (report.at_most or 0.0) > (report.stall or 0.0) + 0.001,
        "causes": causes,
        "main_cause": max(causes, key=causes.__getitem__, default=None),
        "predicted_gain": report.causes[FAULTS[fault]].speed_up,
    }


def compare(fault: str, found: dict[str, Entry]) -> Entry:
    """Both runs, side by side."""
    return found["metered"] | {"expected_cause": FAULTS[fault], "traced": found.get("traced")}


def in_a_process(options: argparse.Namespace, run: str) -> Entry:
    command = [
        sys.executable,
        "-m",
        "benchmarks.stall.case",
        options.fault,
        "--device",
        options.device,
        "--run",
        run,
    ]
    command += ["--small"] * options.small
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode:
        sys.exit(said.stderr or f"{run} ended with {said.returncode}")
    found: Entry = json.loads(said.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("data", nargs="?", help="not needed; the other cases are given it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--settings", help="as data")
    parser.add_argument("--run", choices=RUNS)
    options = parser.parse_args()
    scale = SMALL if options.small else LARGE
    if options.run:
        print(json.dumps(one_run(options.fault, options.device, scale, options.run)))
        return
    runs = RUNS if options.device == "cuda" else RUNS[:1]  # a CPU has no kernels to trace
    print(json.dumps(compare(options.fault, {run: in_a_process(options, run) for run in runs})))


if __name__ == "__main__":
    main()
