"""Five situations as people describe them, and each optimization alone: how much does it gain?

    a to e       situations: the loop as it was, and `train`
    idle         (f) a simulated device of 50 ms a step, beside tokenizing in the loop
    ladder       (g) one change a row, from batches of 1 to `train`
    workers      (h) workers and prefetch, beside the device of (f)
    memory       counted bytes by batch size, and the largest batch of each card
    precision    counted bytes by number format
    accumulation counted bytes and time of a step in 1, 2 and 4 micro-batches
    saving       seconds that saving blocks, per 1,000 steps

Each situation is run as it was, by a loop of torch and `transformers`, and by `train`: one model
with the same first weights, AdamW, clipping, a linear schedule, as many rows, on the CPU in fp32.
Each side has the learning rate that suits it best of those tried, for steps may differ in size.
Every run is a process of its own with one thread, the sides in turn, a seed a round; figures are
medians. One function says the loss of held-out rows. Refuted where `train` is not twice as fast in
real tokens a second, or its loss is worse by more than seeds make it.

usage: python -m benchmarks.scenarios [--case a] [--rounds 3] [--data FOLDER]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.protocol import RESULTS, summary, write_result
from benchmarks.scenarios import data as scenarios_data
from benchmarks.scenarios.case import SCENARIOS, SIDES
from benchmarks.scenarios.parts import PARTS
from benchmarks.scenarios.plot import plot

Entry = dict[str, Any]


def measure(case: str, folder: Path, rounds: int) -> list[Entry]:
    """Both sides of a situation, in turn."""
    runs: dict[str, list[Entry]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            runs[side] += run_apart(case, number, folder, "--side", side)
            print(f"{case}, {side}: {runs[side][-1]}", file=sys.stderr, flush=True)
    entries = [describe(case, side, runs[side]) for side in SIDES]
    for name in ("tokens_s", "tokens_cpu_s"):
        pairs = zip(runs["after"], runs["before"], strict=True)
        entries[-1][f"times_{name}"] = summary([new[name] / old[name] for new, old in pairs], 2)
    return entries


def describe(case: str, side: str, runs: list[Entry]) -> Entry:
    """The figures of one side."""
    scenario = SCENARIOS[case]
    return {
        "case": case,
        "said": scenario.said,
        "side": side,
        "rows": scenario.rows,
        "steps": runs[0]["steps"],
        "learning_rate": scenario.rate(side),
        "steps_s": summary([run["steps_s"] for run in runs], 2),
        "tokens_s": summary([run["tokens_s"] for run in runs], 0),
        "tokens_cpu_s": summary([run["tokens_cpu_s"] for run in runs], 0),
        "padding": round(statistics.median(run["padding"] for run in runs), 4),
        "stall": {
            cause: round(statistics.median(run["stall"][cause] for run in runs), 4)
            for cause in runs[0]["stall"]
        },
        "loss": summary([run["loss"] for run in runs], 4),
        "peak_memory_mb": round(statistics.median(run["peak_memory_mb"] for run in runs)),
    }


def run_apart(case: str, seed: int, folder: Path, *options: str) -> list[Entry]:
    """Run in a process that does nothing else, and return the lines that it prints."""
    command = [sys.executable, "-m", "benchmarks.scenarios", "--case", case, "--data", str(folder)]
    command += ["--seed", str(seed), *options]
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=one, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join([case, *options])} failed:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measure_part(part: str, folder: Path, rounds: int) -> list[Entry]:
    """Measure an optimization in processes of their own. Figures that differ between rounds are
    medians [least, most]."""
    runs = [run_apart(part, number, folder) for number in range(rounds)]
    for entry in runs[0]:
        print(f"{part}: {entry}", file=sys.stderr, flush=True)
    entries = []
    for same in zip(*runs, strict=True):
        entry: Entry = {"case": part}
        for name, value in same[0].items():
            values = [run[name] for run in same]
            is_measured = isinstance(value, float) and len(set(values)) > 1
            entry[name] = summary(values, 4) if is_measured else value
        entries.append(entry)
    return entries


def run_here(case: str, side: str, seed: int, folder: Path) -> Entry:
    scenario = SCENARIOS[case]
    outcome = SIDES[side](scenario, scenarios_data.make(scenario.data, folder), seed)
    found = outcome.marks.speed() | {"steps": len(outcome.marks.wall)}
    status = Path("/proc/self/status").read_text()  # getrusage would begin with the parent's
    kilobytes = next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]
    memory = int(kilobytes) / 1e3
    return found | {"stall": outcome.stall, "loss": outcome.loss, "peak_memory_mb": memory}


def others(path: Path) -> list[Entry]:
    """Return the results that a file has already."""
    found: list[Entry] = json.loads(path.read_text())["results"] if path.exists() else []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cases = [*SCENARIOS, *PARTS]
    parser.add_argument("--case", choices=cases, help="this one alone; others are kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="keep the data sets here")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.side:
        print(json.dumps(run_here(options.case, options.side, options.seed, options.data)))
        return
    if options.case in PARTS and options.seed is not None:
        for entry in PARTS[options.case].measure(options.data, options.seed):
            print(json.dumps(entry), flush=True)
        return
    chosen = [options.case] if options.case else cases
    with tempfile.TemporaryDirectory() as name:
        folder = options.data or Path(name)
        for case in chosen:
            is_part = case in PARTS
            question = "optimizations" if is_part else "scenarios"
            found = [
                entry
                for entry in others(options.results / f"{question}.json")
                if entry["case"] != case
            ]
            if is_part:
                rounds = options.rounds if PARTS[case].is_timed else 1
                found += measure_part(case, folder, rounds)
            else:
                scenarios_data.make(SCENARIOS[case].data, folder)
                found += measure(case, folder, options.rounds)
            found.sort(key=lambda entry: cases.index(entry["case"]))  # before stays before after
            path = write_result(question, found, options.results, threads=1)
            print(f"written to {path}" + ("" if is_part else f" and {plot(path)}"))


if __name__ == "__main__":
    main()
