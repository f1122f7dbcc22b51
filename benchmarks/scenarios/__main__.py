"""Five situations as people describe them: how fast is their loop, and how fast is `train`?

Each is run as it was, by a loop of torch and `transformers`, and by `train`: one model with the
same first weights, AdamW, clipping, a linear schedule, as many rows, on the CPU in fp32. Each side
has the learning rate that suits it best of those tried, for steps may differ in size. Every run is
a process of its own with one thread, the sides in turn, a seed a round; figures are medians. One
function says the loss of held-out rows. Refuted where `train` is not twice as fast in real tokens a
second, or its loss is worse by more than seeds make it.

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
from benchmarks.scenarios.plot import plot

Entry = dict[str, Any]


def measure(case: str, folder: Path, rounds: int) -> list[Entry]:
    """Both sides of a situation, in turn."""
    runs: dict[str, list[Entry]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            runs[side].append(run_apart(case, side, number, folder))
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


def run_apart(case: str, side: str, seed: int, folder: Path) -> Entry:
    """In a process that does nothing else."""
    command = [sys.executable, "-m", "benchmarks.scenarios", "--case", case, "--data", str(folder)]
    command += ["--side", side, "--seed", str(seed)]
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=one, check=False)
    if done.returncode:
        sys.exit(f"error: {case}, {side} failed:\n{done.stderr}")
    found: Entry = json.loads(done.stdout.splitlines()[-1])
    return found


def run_here(case: str, side: str, seed: int, folder: Path) -> Entry:
    scenario = SCENARIOS[case]
    outcome = SIDES[side](scenario, scenarios_data.make(scenario.data, folder), seed)
    found = outcome.marks.speed() | {"steps": len(outcome.marks.wall)}
    status = Path("/proc/self/status").read_text()  # getrusage would begin with the parent's
    kilobytes = next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]
    memory = int(kilobytes) / 1e3
    return found | {"stall": outcome.stall, "loss": outcome.loss, "peak_memory_mb": memory}


def others(path: Path, case: str | None) -> list[Entry]:
    """The results of situations that are not measured again."""
    if case is None or not path.exists():
        return []
    return [each for each in json.loads(path.read_text())["results"] if each["case"] != case]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--case", choices=list(SCENARIOS), help="this one alone; others are kept")
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
    with tempfile.TemporaryDirectory() as name:
        folder = options.data or Path(name)
        found = others(options.results / "scenarios.json", options.case)
        for case in [options.case] if options.case else SCENARIOS:
            scenarios_data.make(SCENARIOS[case].data, folder)
            found += measure(case, folder, options.rounds)
    found.sort(key=lambda entry: entry["case"])  # before stays before after
    path = write_result("scenarios", found, options.results, threads=1)
    print(f"written to {path} and {plot(path)}")


if __name__ == "__main__":
    main()
