"""Runs loader_case.py in a process of its own, and watches the memory of all its processes."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loader_case import own_folder

__all__ = ["CaseError", "bytes_in", "family_pss", "run_case"]

SAMPLE_SECONDS = 1.0
"""A sample takes 11 ms a process, of the cores that are being measured."""
PATIENCE_SECONDS = 600


class CaseError(Exception):
    """A loader failed; the text is the last line it wrote."""


def run_case(
    python: str, action: str, loader: str, kind: str, data: Path, *options: object
) -> dict[str, Any]:
    """One action of one loader: what it printed, and the most memory it took.

    Its home folder is its own, so that the copies it makes there are found and counted.
    """
    home = own_folder(data, kind, loader) / "home"
    home.mkdir(parents=True, exist_ok=True)
    command = [python, str(Path(__file__).with_name("loader_case.py"))]
    command += [action, loader, kind, str(data), *map(str, options)]
    environment = os.environ | {
        "HOME": str(home),
        "DATA_OPTIMIZER_CACHE_FOLDER": str(home / "optimizer"),  # else /tmp
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=out, stderr=errors, env=environment, start_new_session=True
        )
        peak = watch(process)
        out.seek(0)
        errors.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith("{")]
        said = errors.read().splitlines()
    if not lines:
        raise CaseError(said[-1] if said else f"ended with {process.returncode}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result | {"peak_memory_mb": peak / 1e6}


def watch(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of all; the most bytes the processes had together."""
    peak, deadline = 0, time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SAMPLE_SECONDS)
        peak = max(peak, family_pss(process.pid))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a hung loader, and workers it left
    process.wait()
    return peak


def family_pss(pid: int) -> int:
    """Bytes of a process and all below it; what they share counts once."""
    return sum(map(pss, family(pid)))


def family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
