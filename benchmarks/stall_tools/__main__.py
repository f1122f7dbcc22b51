"""`tokenfeed stall` beside TraceML, on the same training scripts.

script.py has one fault at a time, and a stopwatch inside that neither tool reads. A round runs
each script with plain `python`, with `tokenfeed stall` and with TraceML; the next round runs them
backwards. TraceML needs a changed script. It is derived here, so that its changes can be counted,
and in the way that lets TraceML see most: its quick start brackets the step from `zero_grad` to
the optimizer, and here the bracket holds evaluation and saving as well, which TraceML counts as
`Residual`; batches that come from no DataLoader are wrapped.

Refuted if the share of `tokenfeed stall` is over 2 points from the stopwatch, if its verdict names
another cause, or if its runs take longer than those of TraceML.

usage: python -m benchmarks.stall_tools --traceml peers/bin/traceml    # pip install traceml-ai
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.protocol import write_result

__all__ = ["FAULTS", "share_of_stopwatch", "with_traceml"]

Entry = dict[str, Any]

SCRIPT = Path(__file__).parent / "script.py"
TOOLS = ("python", "tokenfeed", "traceml")
FAULTS: dict[str, tuple[str, str]] = {
    "slow data": ("data", "input_wait_ms"),
    "evaluation": ("evaluation", "residual_ms"),
    "save": ("checkpoint", "residual_ms"),
    "item": ("wait", "residual_ms"),
    "own generator": ("other", "input_wait_ms"),
    "own thread": ("data", "input_wait_ms"),
    "accumulation": ("data", "input_wait_ms"),
    "late rank": ("data", "input_wait_ms"),
}
"""Where `tokenfeed stall` and TraceML can show the time of each fault."""
REPEATED = ("slow data", "evaluation")
"""What further rounds run, for the cost of the tools."""
ROUNDS = 2
WARM_STEPS = 5
"""Steps before the stopwatch counts."""


def with_traceml(source: str, *, is_loader: bool) -> tuple[str, list[int]]:
    """Return the script as TraceML needs it, and how many lines are new and only indented.

    Args:
        source: The script, with one loop at the left margin.
        is_loader: Whether the batches come from a DataLoader, which TraceML finds by itself.
    """
    lines = source.splitlines(keepends=True)
    loop = next(at for at, line in enumerate(lines) if line.startswith("for "))
    end = next(at for at in range(loop + 1, len(lines)) if not lines[at].startswith((" ", "\n")))
    body = [line if line == "\n" else f"    {line}" for line in lines[loop + 1 : end]]
    imports = lines.index("import torch\n")
    head = lines[loop]
    if not is_loader:
        head = head.replace("timing(batches)", "traceml.wrap_dataloader_fetch(timing(batches))")
    begin = ['traceml.init(mode="auto")\n', head, "    with traceml.trace_step(model):\n"]
    imported = [*lines[:imports], "import traceml_ai as traceml\n", *lines[imports:loop]]
    text = "".join([*imported, *begin, *body, "\n", *lines[end:]])
    return text, [3 if is_loader else 4, sum(line != "\n" for line in body)]


def share_of_stopwatch(found: Entry) -> float:
    """Return the share of the time that the fault took, from the warm-up to the last step."""
    steps = found["steps"]
    first, last = steps[WARM_STEPS - 1], steps[-1]
    inside = (min(end, last) - max(begin, first) for begin, end in found["timed"])
    return float(sum(seconds for seconds in inside if seconds > 0) / (last - first))


def command(tool: str, fault: str, script: Path, folder: Path, traceml: str) -> list[str]:
    """Return the command of a tool; `folder` gets its results."""
    ranks = 2 if fault == "late rank" else 1
    if tool == "traceml":
        options = ["--logs-dir", str(folder), "--run-name", "run", "--nproc-per-node", str(ranks)]
        return [traceml, "run", str(script), *options, "--args", fault]
    launched = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29511"]
    run = [sys.executable, *launched] if ranks > 1 else [sys.executable]
    if tool == "tokenfeed":
        run += ["-m", "tokenfeed", "stall", "--out", str(folder)]
    return [*run, str(script), fault]


def run(tool: str, fault: str, traceml: str) -> Entry:
    """Run a script with one tool; return what the tool reports, and what the run took."""
    source = SCRIPT.read_text()
    with tempfile.TemporaryDirectory() as name:
        folder, script = Path(name), Path(name) / SCRIPT.name
        text, changes = source, [0, 0]
        if tool == "traceml":
            text, changes = with_traceml(source, is_loader=not fault.startswith("own"))
        script.write_text(text)
        used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        ended = subprocess.run(
            command(tool, fault, script, folder / "out", traceml),
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"STOPWATCH": str(folder / "stopwatch"), "OMP_NUM_THREADS": "1"},
        )
        seconds = time.perf_counter() - began
        total = resource.getrusage(resource.RUSAGE_CHILDREN)
        if ended.returncode:
            sys.exit(f"{tool}, {fault}: ended with {ended.returncode}\n{ended.stderr}")
        rank = 1 if fault == "late rank" else 0
        found: Entry = {
            "fault": fault,
            "tool": tool,
            "seconds": round(seconds, 2),
            "cpu_seconds": round(
                total.ru_utime + total.ru_stime - used.ru_utime - used.ru_stime, 2
            ),
            "truth": share_of_stopwatch(
                json.loads((folder / f"stopwatch.{rank}.json").read_text())
            ),
            "lines_changed": changes,
            "stdout": [line for line in ended.stdout.splitlines() if line.startswith("losses")],
        }
        read = {"tokenfeed": of_tokenfeed, "traceml": of_traceml}.get(tool)
        return found | (read(folder / "out", fault) if read else {})


def of_tokenfeed(folder: Path, fault: str) -> Entry:
    """Return verdict, reason and share of `tokenfeed stall`."""
    report = json.loads((folder / "report.json").read_text())["stall"]
    late = folder / "rank1" / "report.json"
    rank = json.loads(late.read_text())["stall"] if late.exists() else report
    share = rank["causes"].get(FAULTS[fault][0], {}).get("fraction", 0.0)
    return {"verdict": report["verdict"], "reason": report["reason"], "share": share}


def of_traceml(folder: Path, fault: str) -> Entry:
    """Return verdict, reason and share of TraceML."""
    report = json.loads((folder / "run" / "final_summary.json").read_text())
    rows = report["step_time"]["groups"]["rows"]
    metrics = rows["1" if fault == "late rank" else "0"]["metrics"]
    part, whole = metrics[FAULTS[fault][1]], metrics["step_time_ms"]
    verdict = report["primary_diagnosis"]
    share = None if part is None or not whole else part / whole
    return {"verdict": verdict["status"], "reason": verdict["summary"], "share": share}


def in_turns() -> Iterator[tuple[str, str]]:
    """Yield fault and tool of each run."""
    for number in range(ROUNDS):
        for fault in REPEATED if number else FAULTS:
            for tool in reversed(TOOLS) if number % 2 else TOOLS:
                yield fault, tool


def version_of(traceml: str) -> str:
    """Return the version of the TraceML that an executable belongs to."""
    folders = [str(path) for path in Path(traceml).resolve().parents[1].glob("lib/*/site-packages")]
    found = distributions(name="traceml-ai", path=folders)
    return next((each.version for each in found), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traceml", default="traceml", help="its executable")
    parser.add_argument("--only", nargs="+", choices=FAULTS, help="to try some; writes no result")
    options = parser.parse_args()
    results = []
    for fault, tool in in_turns():
        if options.only and fault not in options.only:
            continue
        results.append(run(tool, fault, options.traceml))
        print(json.dumps(results[-1]), flush=True)
    if not options.only:
        write_result("stall_tools", results, traceml=version_of(options.traceml))


if __name__ == "__main__":
    main()
