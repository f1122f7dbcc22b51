"""What does the loop cost, and what does each of its choices bring? On the CPU, at a small size.

One model, one optimizer, the same rows and steps for `train` and for a bare loop over batches that
are ready in memory (the bound); and with choices switched off. All systems run in turn in
one process with one thread, several rounds; a figure is the median. Peak memory is of a process of
its own, by a second call with --memory. Refuted by a loop more than 3 % behind the bare one.

usage: python -m benchmarks.trainer [--steps 40] [--rounds 5] [--case classify] [--memory]
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.protocol import RESULTS, summary, write_result
from benchmarks.trainer import data as trainer_data
from benchmarks.trainer.systems import CASES, SKIPPED, Case, Run, by_bare_loop, by_train

Entry = dict[str, Any]


System = Callable[[Case, Path, int], Run]
_COMMON: dict[str, System] = {"train": by_train, "bare loop": by_bare_loop}
SYSTEMS: dict[str, dict[str, System]] = {
    "classify": _COMMON
    | {
        "train, rows in random order": functools.partial(by_train, spread=1.0),
        "train, a line each step": functools.partial(by_train, log_every=1),
        "bare loop, AdamW foreach": functools.partial(by_bare_loop, kernels="foreach"),
        "bare loop, loss.item()": functools.partial(by_bare_loop, item=True),
    },
    "tag": _COMMON,
    "lm": _COMMON | {"train, padded": functools.partial(by_train, batching="padded")},
}


def describe(runs: list[Run]) -> Entry:
    """The figures of one system; all its runs have the same rows."""
    speeds = [run.speed() for run in runs]
    last = runs[-1]
    return {
        "tokens_s": summary([each["wall"] for each in speeds], 0),
        "tokens_cpu_s": summary([each["cpu"] for each in speeds], 0),
        "undisturbed": round(undisturbed(runs)),
        "padding": round(1 - sum(last.tokens) / last.slots, 4),
        "loss": round(statistics.median(run.loss for run in runs), 4),
    }


def measure(task: str, shards: Path, steps: int, rounds: int) -> list[Entry]:
    """All systems of a case, in turn."""
    case = next(case for case in CASES if case.task == task)
    systems = SYSTEMS[task]
    runs: dict[str, list[Run]] = {name: [] for name in systems}
    for number in range(rounds):
        names = list(systems)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            runs[name].append(systems[name](case, shards, steps))
            print(f"{task}, {name}: {runs[name][-1].speed()}", file=sys.stderr, flush=True)
    entries = [
        {"case": task, "system": name, "steps": steps, "rounds": rounds} | describe(runs[name])
        for name in systems
    ]
    for entry in entries:
        bound = undisturbed(runs["bare loop"])
        entry["of_bound"] = round(undisturbed(runs[entry["system"]]) / bound, 3)
    return entries


def undisturbed(runs: list[Run]) -> float:
    """Real tokens per second of the processor, each step by its quickest round: all rounds train
    the same rows, and what else a machine does only ever adds."""
    seconds = np.array([np.diff(run.clock.cpu)[SKIPPED - 1 : -1] for run in runs])
    tokens = sum(runs[0].tokens[SKIPPED : len(runs[0].clock.cpu) - 1])
    return float(tokens / seconds.min(axis=0).sum())


def peak(entry: Entry, folder: Path) -> int:
    """Of a process that does nothing else."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.trainer",
        "--case",
        entry["case"],
        "--data",
        folder,
    ]
    command += ["--peak", entry["system"]]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return round(json.loads(out.splitlines()[-1]))


def peak_here(task: str, name: str, shards: Path) -> float:
    case = next(case for case in CASES if case.task == task)
    SYSTEMS[task][name](case, shards, 2 * SKIPPED)
    status = Path("/proc/self/status").read_text()  # getrusage would begin with the parent's
    kilobytes = next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]
    return int(kilobytes) / 1e3


def show(results: list[Entry]) -> None:
    names = ("case", "system", "tokens_s", "of_bound", "padding", "loss", "peak_memory_mb")
    table = Table(*names)
    for entry in results:
        table.add_row(*(str(entry.get(name)) for name in names))
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--case", choices=list(SYSTEMS), help="this one alone; others are kept")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, help="keep the data sets here")
    parser.add_argument("--memory", action="store_true", help="alone; speeds are kept")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = options.data or Path(name)
        tasks = [options.case] if options.case else list(SYSTEMS)
        if options.peak:
            shards = trainer_data.make(options.case, folder)
            print(json.dumps(peak_here(options.case, options.peak, shards)))
            return
        measured = set() if options.memory else set(tasks)
        found = before(options.results, set(SYSTEMS) - measured)
        for task in tasks:
            shards = trainer_data.make(task, folder)
            if not options.memory:
                found += measure(task, shards, options.steps, options.rounds)
        if options.memory:
            found = [entry | {"peak_memory_mb": peak(entry, folder)} for entry in found]
    results = [entry for task in SYSTEMS for entry in found if entry["case"] == task]
    show(results)
    print(f"written to {write_result('trainer', results, options.results, threads=1)}")


def before(folder: Path, tasks: set[str]) -> list[Entry]:
    """The results of cases that are not measured again."""
    path = folder / "trainer.json"
    results = json.loads(path.read_text())["results"] if path.exists() else []
    return [entry for entry in results if entry["case"] in tasks]


if __name__ == "__main__":
    main()
