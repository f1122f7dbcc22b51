"""One check or measurement in one process: what benchmarks/gpu/ starts for each of its parts.

It prints one line of JSON, and ends with a traceback where it fails. `races` uses batches while
torch's sanitizer watches, which TORCH_CUDA_SANITIZER=1 in the environment switches on; `waits`
trains some steps in which a wait of the host for the device is an error; `loader` and `train` say
how fast it goes; `speed` trains compiled steps of one micro-batch.

usage: case.py races|waits|loader|train|speed DATA [--device cuda] [--small] [--settings JSON]
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.before import leave_out
from benchmarks.gpu.memory import RunPlan
from tokenfeed import Packed, Padded, ShardLoader
from tokenfeed.pipeline.planning.policies import Batching
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.loop.run import train
from tokenfeed.trainer.loop.trainer import Trainer
from tokenfeed.trainer.stall import Cause, StallMeter

__all__ = ["Scale"]

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is done."""

    model: str
    sequence_length: int
    micro_batch_tokens: int
    steps: int
    batches: int
    """Of a loader that is watched."""
    seconds: float
    """Of a loader that is timed."""
    step_rows: int
    """Of the step of `speed`."""


LARGE = Scale(
    model="gpt2",
    sequence_length=1024,
    micro_batch_tokens=16_384,
    steps=60,
    batches=300,
    seconds=5.0,
    step_rows=64,
)
SMALL = Scale(
    model="tiny",
    sequence_length=256,
    micro_batch_tokens=512,
    steps=4,
    batches=20,
    seconds=0.2,
    step_rows=2,
)
TRACED_STEPS = 2
WAITING_STEPS = 20
LONGEST_KERNELS = 40


def policies(scale: Scale) -> dict[str, Batching]:
    """Both ways to make micro-batches of documents."""
    tokens, length = scale.micro_batch_tokens, scale.sequence_length
    return {"padded": Padded(tokens), "packed": Packed(length, batch_size=tokens // length)}


def races(data: Path, device: str, scale: Scale) -> Entry:
    """Batches that are read and written into; the sanitizer raises at a race."""
    for batching in policies(scale).values():
        with ShardLoader(data / "lm", batching=batching, device=device, epochs=None) as loader:
            for batch in islice(loader, scale.batches):
                for value in batch.values():
                    if isinstance(value, torch.Tensor):
                        value.sum()
                batch["labels"].add_(1)
    settle(device)
    return {"batches": len(policies(scale)) * scale.batches}


def waits(data: Path, device: str, scale: Scale, settings: Entry) -> Entry:
    """Steps in which only log lines, saves and evaluations may wait; torch raises at a wait."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        steps = {"steps": WAITING_STEPS, "log_every": 5}
        trainer = Trainer(config(data, device, scale, Path(folder) / "run", settings | steps))
        with contextlib.closing(trainer):
            with waits_are_errors():
                trainer.train(lambda: False)
            trainer.finish()
    return {"steps": WAITING_STEPS}


@contextlib.contextmanager
def waits_are_errors() -> Iterator[None]:
    """From the first bracket of the stall meter on, outside of those that may wait."""
    bracket = StallMeter.cause

    @contextlib.contextmanager
    def cause(meter: StallMeter, name: Cause) -> Iterator[None]:
        with bracket(meter, name):
            torch.cuda.set_sync_debug_mode("error" if name == "data" else "default")
            yield
        torch.cuda.set_sync_debug_mode("error")

    StallMeter.cause = cause  # type: ignore[method-assign]
    try:
        yield
    finally:
        StallMeter.cause = bracket  # type: ignore[method-assign]
        torch.cuda.set_sync_debug_mode("default")


def loader(data: Path, device: str, scale: Scale) -> Entry:
    """Real tokens a second that arrive on the device, when nothing is made of them."""
    rates = {}
    for name, batching in policies(scale).items():
        with ShardLoader(data / "lm", batching=batching, device=device, epochs=None) as feed:
            batches = iter(feed)
            for _ in range(scale.batches):  # workers start, memory is page-locked
                next(batches)
            rates[name] = round(rate(batches, scale.seconds))
    return {"tokens_per_s": rates}


def rate(batches: Iterator[Any], seconds: float) -> float:
    started, tokens = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        batch = next(batches)
        tokens += batch.num_tokens
    settle(batch.device.type)
    return tokens / (time.perf_counter() - started)


def settle(device: str) -> None:
    """Wait until all that was queued is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def measured_training(data: Path, device: str, scale: Scale, settings: Entry) -> Entry:
    """What a run reports of itself, and the most memory it took of a GPU."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report = train(config(data, device, scale, Path(folder) / "run", settings), lambda: False)
    return {
        "model": report.model,
        "precision": report.precision,
        "tokens_per_s": report.real_tokens_per_s and round(report.real_tokens_per_s),
        "stall": asdict(report.stall),
        "padding": report.padding,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


def speed(data: Path, device: str, scale: Scale, settings: Entry) -> Entry:
    """Tokens and kernels of a compiled step, its memory (predicted, too), stall by cause."""
    leave_out(settings.pop("without", []))
    is_traced = settings.pop("traced", True)
    tokens = scale.step_rows * settings.pop("times", 1) * scale.sequence_length
    settings = {
        "micro_batch_tokens": tokens,
        "step_tokens": tokens,
        "compile": device == "cuda",
        "attention": "rows",
    } | settings
    traced = {"steps": TRACED_STEPS + 5}
    schedule = torch.profiler.schedule(wait=4, warmup=1, active=TRACED_STEPS, repeat=1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = config(data, device, scale, Path(folder) / "run", dict(settings))
        like = replace(run, precision="bf16" if device == "cuda" else "fp32")
        plan = RunPlan(like, on_gpu=device == "cuda")
        report = train(run, lambda: False)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        found = {
            "model": report.model,
            "precision": report.precision,
            "tokens_per_step": tokens,
            "tokens_per_s": report.real_tokens_per_s and round(report.real_tokens_per_s),
            "mfu": report.stall.mfu,
            "peak_memory_bytes": peak,
        }
        if not is_traced:
            return found
        # A run of its own: a profiler slows what comes after it.
        profiled = config(data, device, scale, Path(folder) / "traced", settings | traced)
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(
            schedule=schedule, on_trace_ready=lambda found: found.export_chrome_trace(str(path))
        ) as profiler:

            def traced_step() -> bool:
                settle(device)  # a step's kernels run in its own part of the trace
                return bool(profiler.step())

            train(profiled, bool, traced_step)
        trace = json.loads(path.read_text())
    kernels: dict[str, list[float]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            kernels.setdefault(event["name"], []).append(event["dur"] / 1e3)
    by_time = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    return found | {
        "kernels": sum(map(len, kernels.values())) / TRACED_STEPS if device == "cuda" else None,
        "longest_kernels": {
            name: {
                "launches": len(times) / TRACED_STEPS,
                "milliseconds": round(sum(times) / TRACED_STEPS, 3),
            }
            for name, times in by_time[:LONGEST_KERNELS]
        },
        "predicted_memory_bytes": plan.peak(run),
        "stall": asdict(report.stall),
    }


def config(data: Path, device: str, scale: Scale, run_dir: Path, settings: Entry) -> TrainConfig:
    """A run of the scale, with some settings of its own."""
    task = settings.pop("task", "lm")
    defaults: Entry = {
        "model": scale.model,
        "steps": scale.steps,
        "sequence_length": scale.sequence_length,
        "micro_batch_tokens": scale.micro_batch_tokens,
        "step_tokens": scale.micro_batch_tokens,
        "save_every": 10**6,
        "warmup_steps": 2,
    }
    return TrainConfig(
        shards=str(data / task), device=device, run_dir=run_dir, **defaults | settings
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("races", "waits", "loader", "train", "speed"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--settings", type=json.loads, default={})
    options = parser.parse_args()
    arguments = options.data, options.device, SMALL if options.small else LARGE
    if options.action in ("races", "loader"):
        found = {"races": races, "loader": loader}[options.action](*arguments)
    else:
        run = {"waits": waits, "train": measured_training, "speed": speed}[options.action]
        found = run(*arguments, options.settings)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
