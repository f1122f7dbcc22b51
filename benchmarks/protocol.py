"""What all benchmarks share: the environment they ran in, medians of repeats, result files."""

import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "environment", "installed", "summary", "write_result"]

RESULTS = Path(__file__).parent / "results"
_PACKAGES = (
    *("torch", "numpy", "pyarrow", "xxhash", "msgspec"),
    *("tokenizers", "gigatoken", "datasets"),
)


def environment() -> dict[str, Any]:
    """Hardware, versions and commit, as every result file records them."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=RESULTS,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit or "unknown",
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
    }


def installed(peers: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the versions of the packages of each peer whose `packages` are all installed here."""
    found = {}
    for name, peer in peers.items():
        with contextlib.suppress(PackageNotFoundError):
            found[name] = {each: version(each) for each in peer.packages}
    return found


def summary(values: list[float], digits: int = 1) -> dict[str, float]:
    """Median, least and most of several runs."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def write_result(
    question: str,
    results: list[dict[str, Any]],
    folder: Path = RESULTS,
    **more_environment: object,
) -> Path:
    """Write `<question>.json`: the environment, then one entry per case, each in a line."""
    path = folder / f"{question}.json"
    folder.mkdir(exist_ok=True)
    about = json.dumps(environment() | more_environment)
    lines = ",\n".join(map(json.dumps, results))
    path.write_text(f'{{"environment": {about},\n"results": [\n{lines}\n]}}\n')
    return path


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
