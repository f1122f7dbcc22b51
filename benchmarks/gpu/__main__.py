"""What only a GPU can tell: are the checks that need one passed, and how fast does it go?

The tests marked `cuda`; batches under torch's sanitizer, which finds memory that two streams use in
no order; 20 steps of every task in which a wait of the host is an error; the speed of loader and
trainer; a compiled step with its kernels and its memory; what the stall meter assumes of a GPU; and
fault by fault the stall meter beside a trace. Each part is a process of its own. The result stands
in results/gpu-NAME.json, one file that can be attached to an issue: every figure in it was measured
on the machine it names, predictions are called so, and a part that failed says so.

usage: python -m benchmarks.gpu [--name NAME]               # needs a CUDA device; `make gpu`
       python -m benchmarks.gpu --only stall                # the stall meter, in 8 minutes
       python -m benchmarks.gpu --only speed                # a step with and without its rewrites,
                                                            # in at most 8 minutes
       python -m benchmarks.gpu --device cpu --small        # tries the parts that need none
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.before import REWRITES
from benchmarks.gpu.data import TASKS, make_data
from benchmarks.gpu.stall_checks import CHECKS as STALL_CHECKS
from benchmarks.gpu.tables import speed_table, stall_table
from benchmarks.protocol import RESULTS, write_result
from benchmarks.stall.case import FAULTS, LOOPS

__all__ = ["PARTS", "RUNS"]

Entry = dict[str, Any]

PYTEST = ["-m", "pytest", "-q", "-m", "cuda", "--no-header", "-p", "no:cacheprovider"]
CASE = ["-m", "benchmarks.gpu.case"]
STALL_CASE = ["-m", "benchmarks.stall.case"]
STALL_CHECK = ["-m", "benchmarks.gpu.stall_checks"]
RUNS: dict[str, Entry] = {
    **{task: {"task": task} for task in TASKS},
    "muon": {"optimizer": "muon"},
}
"""Settings of what is trained."""
COMPILED: dict[str, Entry] = {"lm compiled": {"compile": True}}
SPEEDS: dict[str, Entry] = {
    "before": {"without": [*REWRITES]},
    "as CUDA graphs": {"compile": "reduce-overhead", "traced": False},
    **{
        f"of tiny, {name}": {"model": "tiny", "sequence_length": 256, "traced": False} | more
        for name, more in {
            "as CUDA graphs": {"compile": "reduce-overhead"},
            "compiled": {},
            "eager": {"compile": False},
        }.items()
    },
    **{f"without {name}": {"without": [name], "traced": False} for name in REWRITES},
    "of twice the rows": {"times": 2, "traced": False},
}
"""Settings of the steps that stand beside the plain one."""
SPEED_SECONDS, LEAST_SECONDS = 480, 20
"""Seconds in which all of them end, and with fewer left none begins."""
TESTS = Path(__file__).parents[2] / "tests"
CHECKS = ("tests", "races", "waits")
"""What measures no time."""
CHECK_BYTES = 16_000_000_000
"""Memory of a GPU that a check may need."""
NEEDS_NO_DATA = ("tests", "stall")
NEEDS_CUDA = ("tests", "races", "waits", "stall")


def _needs_cuda(path: Path) -> bool:
    return "mark.cuda" in path.read_text()


PARTS: dict[str, list[str]] = {
    "tests": [*PYTEST, *(str(path) for path in TESTS.rglob("test_*.py") if _needs_cuda(path))],
    "races": [*CASE, "races"],
    **{f"waits {name}": [*CASE, "waits"] for name in RUNS},
    "loader": [*CASE, "loader"],
    **{f"train {name}": [*CASE, "train"] for name in RUNS | COMPILED},
    "speed": [*CASE, "speed"],
    **{f"speed {name}": [*CASE, "speed"] for name in SPEEDS},
    **{f"stall {check}": [*STALL_CHECK, check] for check in STALL_CHECKS if check != "slowing"},
    "stall slowing, CUPTI attached": [*STALL_CHECK, "slowing"],
    "stall slowing, CUPTI detached": [*STALL_CHECK, "slowing"],
    **{f"stall {fault}": [*STALL_CASE, fault] for fault in FAULTS | LOOPS},
}
"""What is run, by name: the first word says what, the rest with which settings."""
ENVIRONMENTS = {
    "races": {"TORCH_CUDA_SANITIZER": "1"},
    "stall slowing, CUPTI attached": {"TEARDOWN_CUPTI": "0"},
    "stall slowing, CUPTI detached": {"TEARDOWN_CUPTI": "1"},
}
PATIENCE_SECONDS = 1800


def run_parts(data: Path, options: argparse.Namespace) -> Iterator[Entry]:
    """Run checks side by side, as many as fit the GPU, and then one measurement after the other."""
    checks = [name for name in options.only if name.split()[0] in CHECKS]
    at_once = 1
    if options.device == "cuda":
        at_once = max(1, torch.cuda.get_device_properties(0).total_memory // CHECK_BYTES)
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(lambda name: run_part(name, data, options), checks)
    measured: dict[str, Entry] = {}
    speeds_end_s = None
    for name in options.only:
        left_s = float(PATIENCE_SECONDS)
        if name.startswith("speed"):
            speeds_end_s = speeds_end_s or time.monotonic() + SPEED_SECONDS
            left_s = speeds_end_s - time.monotonic()
        if left_s < LEAST_SECONDS:
            yield {"part": name, "outcome": f"skipped: {SPEED_SECONDS} s are over"}
        elif name not in checks:
            measured[name] = found = run_part(name, data, options, left_s)
            if name.startswith("stall ") and "tokens_per_s" in found:
                mended = measured.get("stall none", {})
                found["measured_gain"] = gain(found, mended)
            yield found


def gain(faulty: Entry, mended: Entry) -> float | None:
    """Return how much faster the loop is without the fault; None if it is another loop."""
    if not mended.get("tokens_per_s") or faulty["loop"] != mended["loop"]:
        return None
    return float(mended["tokens_per_s"] / faulty["tokens_per_s"])


def run_part(
    name: str, data: Path, options: argparse.Namespace, seconds: float = PATIENCE_SECONDS
) -> Entry:
    """One part: what it measured and `passed`, or why it did not within some seconds."""
    what, _, case = name.partition(" ")
    is_compiled = case in COMPILED or "reduce-overhead" in SPEEDS.get(case, {}).values()
    if options.device == "cpu" and (what in NEEDS_CUDA or is_compiled):
        return {"part": name, "outcome": "skipped: no CUDA"}
    command = [sys.executable, *PARTS[name]]
    if what != "tests":
        command += [str(data), "--device", options.device, *["--small"] * options.small]
        of_case = SPEEDS if what == "speed" else RUNS | COMPILED
        command += ["--settings", json.dumps(of_case.get(case, {}))]
    try:
        said = run(command, ENVIRONMENTS.get(name, {}), seconds)
    except subprocess.TimeoutExpired:
        return {"part": name, "outcome": f"failed: took more than {seconds:.0f} s"}
    last = last_line(said.stdout)
    if said.returncode:
        print(said.stdout if what == "tests" else said.stderr, file=sys.stderr, flush=True)
        reason = last if what == "tests" else last_line(said.stderr)
        return {"part": name, "outcome": f"failed: {reason or f'ended with {said.returncode}'}"}
    found = {"tests": last} if what == "tests" else json.loads(last)
    return {"part": name, "outcome": "passed"} | found


def run(
    command: list[str], environment: dict[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, which is killed after some seconds."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=RESULTS.parents[1],
        env=os.environ | environment,
        timeout=seconds,
        check=False,
    )


def last_line(said: str) -> str:
    return (said.splitlines() or [""])[-1]


def machine(device: str) -> Entry:
    """What the figures are of, besides what every benchmark says of its environment."""
    if device == "cpu":
        return {"device": "cpu"}
    gpu = torch.cuda.get_device_properties(0)
    return {
        "device": gpu.name,
        "memory_bytes": gpu.total_memory,
        "capability": f"{gpu.major}.{gpu.minor}",
        "cuda": torch.version.cuda,
    }


def as_text(rows: list[list[str]]) -> str:
    """Return a table with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def slug(name: str) -> str:
    """A name as part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a minute, to try the script")
    words = dict.fromkeys(name.split()[0] for name in PARTS)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*words, *PARTS],
        default=list(words),
        metavar="PART",
        help=f"{', '.join(words)}, or a single part such as 'stall item'",
    )
    parser.add_argument("--name", help="of the result; by default the GPU's")
    parser.add_argument("--data", type=Path, help="folder to keep the data sets in")
    parser.add_argument("--results", type=Path, help="folder of the result")
    options = parser.parse_args()
    chosen = set(options.only)
    options.only = [name for name in PARTS if chosen & {name, name.split()[0]}]
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"no CUDA device (torch {torch.__version__}): nothing was checked or measured. Parts "
            "that need none: python -m benchmarks.gpu --device cpu --small"
        )
    if options.results is None:
        options.results = RESULTS if options.device == "cuda" and not options.small else None
    return options


def main() -> None:
    options = read_options()
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder)
        if any(name.split()[0] not in NEEDS_NO_DATA for name in options.only):
            make_data(data, small=options.small)
        results: list[Entry] = []
        about, path = machine(options.device), None
        for found in run_parts(data, options):
            results.append(found)
            print(json.dumps(found), flush=True)
            if options.results is not None:  # part by part: a GPU may be lent for minutes
                name = slug(options.name or about["device"])
                path = write_result(f"gpu-{name}", results, options.results, **about)
    speeds = [entry for entry in results if entry["part"].startswith("speed")]
    if len(speeds) > 1:
        print(as_text(speed_table(speeds)), flush=True)
    loops = [entry for entry in results if "trace_idle" in entry]
    if loops:
        print(as_text(stall_table(loops)), flush=True)
    if path is not None:
        print(f"{path}: all figures in one file, which you can attach to an issue")
    failed = [entry["part"] for entry in results if entry["outcome"].startswith("failed")]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
