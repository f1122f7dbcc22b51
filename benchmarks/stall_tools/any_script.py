"""Check `tokenfeed stall` on a script of anybody's, with a fault that is put in from outside.

The script's file stays as it is. faults/sitecustomize.py slows down a function that is named here,
and holds a stopwatch that `tokenfeed stall` does not read. The script runs with plain `python`,
without the fault, and with `tokenfeed stall`: exit code and stdout must be the same, and the share
of the cause must be within 2 points of the stopwatch.

usage: python -m benchmarks.stall_tools.any_script --cause data \\
           --slow torch.utils.data._utils.fetch._MapDatasetFetcher.fetch=0.02 \\
           --time torch.utils.data.dataloader._SingleProcessDataLoaderIter._next_data \\
           SCRIPT ARGUMENTS...
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.stall_tools.__main__ import share_of_stopwatch

__all__ = ["check"]

Entry = dict[str, Any]

LARGEST_ERROR = 0.02


def run(command: list[str], faults: list[Any], stopwatch: Path, options: Entry) -> Any:
    """Run a command with the faults and the stopwatch in its processes."""
    added = {"STALL_FAULTS": json.dumps(faults), "STOPWATCH": str(stopwatch)}
    if options.get("named_cuda"):
        added["STALL_NAMED_CUDA"] = str(options["named_cuda"])
    path = os.environ.get("PYTHONPATH", "")
    added["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent / "faults"), path])
    return subprocess.run(
        command, env=os.environ | added, capture_output=True, text=True, check=False
    )


def check(script: list[str], cause: str, faults: list[Any], **options: Any) -> Entry:
    """Run a script with and without `tokenfeed stall`, and compare.

    Args:
        script: The script or `-m` and a module, and arguments.
        cause: Where the report must show the time of the timed functions. It may be `work`.
        faults: Lists of a function, the seconds it sleeps, and whether it is timed.
        options: `ignore`, a pattern for what differs from run to run in stdout; `named_cuda`, the
            library of tests/support/named_cuda.py; `launcher`, what starts Python for each rank;
            `rank`, whose share counts.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start, rank = [sys.executable, *options.get("launcher", ())], options.get("rank", 0)
        fast = [[function, 0.0, is_timed] for function, _, is_timed in faults]
        plain = run([*start, *script], fast, folder / "plain", options)
        command = [*start, "-m", "tokenfeed", "stall", "--out", str(folder / "out")]
        watched = run([*command, *script], faults, folder / "stopwatch", options)
        path, times = folder / "out/report.json", folder / f"stopwatch.{rank}.json"
        ignored = options.get("ignore") or "$^"
        said = [re.sub(ignored, "", each.stdout) for each in (plain, watched)]
        found: Entry = {
            "exit codes": [plain.returncode, watched.returncode],
            "same stdout": sorted(said[0].split("\n")) == sorted(said[1].split("\n"))
            if options.get("launcher")  # ranks print in any order
            else said[0] == said[1],
        }
        if not path.exists() or not times.exists():
            return found | {"failed": watched.stderr[-3000:], "plain": plain.stderr[-1000:]}
        report, stopwatch = json.loads(path.read_text())["stall"], json.loads(times.read_text())
        own = folder / f"out/rank{rank}/report.json" if rank else path
        share = share_of(json.loads(own.read_text())["stall"], cause)
        truth = share_of_stopwatch(stopwatch)
        causes = {
            name: round(part["fraction"], 4)
            for name, part in report["causes"].items()
            if part.get("fraction")
        }
        return found | {
            "cause": cause,
            "truth": round(truth, 4),
            "share": round(share, 4),
            "points off": round(100 * abs(share - truth), 2),
            "verdict": report["verdict"],
            "causes": causes,
            "steps": [len(stopwatch["steps"]), report["steps"]],
            "stdout": said[1][-200:],
            "lines": watched.stderr.splitlines()[-20:],
        }


def share_of(report: Entry, cause: str) -> float:
    """Return the share of a cause, or of the work."""
    if cause == "work":
        return 1 - float(report["stall"])
    return float(report["causes"].get(cause, {}).get("fraction") or 0.0)


def is_good(found: Entry) -> bool:
    """Return whether a check found nothing wrong."""
    codes = found["exit codes"]
    is_near = found.get("points off", 100.0) <= 100 * LARGEST_ERROR
    return codes[0] == codes[1] and found["same stdout"] and is_near


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--cause", required=True)
    parser.add_argument("--slow", action="append", default=[], metavar="FUNCTION=SECONDS")
    parser.add_argument("--time", action="append", default=[], metavar="FUNCTION[=SECONDS]")
    parser.add_argument("--ignore", help="pattern of what may differ in stdout")
    parser.add_argument("--named-cuda", type=Path, help="library of tests/support/named_cuda.py")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    faults = []
    for given, is_timed in ((options.slow, False), (options.time, True)):
        for fault in given:
            function, _, seconds = fault.partition("=")
            faults.append([function, float(seconds or 0), is_timed])
    more = {"ignore": options.ignore, "named_cuda": options.named_cuda}
    found = check(options.script, options.cause, faults, **more)
    print(json.dumps(found, indent=1))
    sys.exit(not is_good(found))


if __name__ == "__main__":
    main()
