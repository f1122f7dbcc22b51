"""Runs loaders in processes of their own, each by the interpreter that has it, and watches their
memory."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.text_loaders.case import OURS, family, own_folder

CASE = ["-m", "benchmarks.text_loaders.case"]

SAMPLE_SECONDS = 1.0
"""A sample takes 11 ms a process, of the cores that are being measured."""
PATIENCE_SECONDS = 600
ERROR = re.compile(r"[\w.]+(Error|Exception|Exit)\b")
"""Begins the line of a traceback that says what was wrong; some say more in lines after it."""


class CaseError(Exception):
    """A loader failed; the text is the line of its error, or the last it wrote."""


def find_peers(pythons: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The interpreter of every loader, and the versions of the peers' packages."""
    homes = dict.fromkeys(OURS, sys.executable)
    versions: dict[str, str] = {}
    for python in pythons:
        done = subprocess.run(
            [python, *CASE, "versions"], check=True, stdout=subprocess.PIPE, text=True
        )
        for name, packages in json.loads(done.stdout).items():
            if name not in homes:
                homes[name] = python
                versions |= packages
    return homes, versions


def prepare(python: str, loader: str, kind: str, data: Path) -> None:
    """Have the loader write its own copy of the rows, if it has not."""
    own = own_folder(data, kind, loader)
    if not (own / "written").exists():
        shutil.rmtree(own, ignore_errors=True)
        run_case(python, "write", loader, kind, data)
        (own / "written").touch()


def run_case(
    python: str, action: str, loader: str, kind: str, data: Path, *options: object
) -> dict[str, Any]:
    """One action of one loader: what it printed, and the most memory it took.

    Its home folder is its own, so that the copies it makes there are found and counted.
    """
    home = own_folder(data, kind, loader) / "home"
    home.mkdir(parents=True, exist_ok=True)
    command = [python, *CASE, action, loader, kind, data, *options]
    result, peak = run(command, home, SAMPLE_SECONDS)
    return result | {"peak_memory_mb": peak / 1e6}


def run(
    command: Sequence[object], home: Path, every_s: float = PATIENCE_SECONDS, **environment: str
) -> tuple[dict[str, Any], int]:
    """A process that ends in time, with `home` for its home folder: what it printed last, and the
    most bytes that it and all below it had, where that is looked at from time to time."""
    more: Mapping[str, str] = {
        "HOME": str(home),
        "DATA_OPTIMIZER_CACHE_FOLDER": str(home / "optimizer"),  # else /tmp
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*map(str, command)],
            stdout=out,
            stderr=errors,
            env=os.environ | more,
            start_new_session=True,
        )
        peak = watch(process, every_s)
        out.seek(0)
        errors.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith("{")]
        said = [line for line in errors.read().splitlines() if line.strip()]
    if not lines:
        named = [line for line in said if ERROR.match(line)]
        raise CaseError((named or said or [f"ended with {process.returncode}"])[-1])
    return json.loads(lines[-1]), peak


def watch(process: subprocess.Popen[bytes], every_s: float) -> int:
    """Wait for the end of all; the most bytes the processes had together."""
    peak, deadline = 0, time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(every_s)
        peak = max(peak, family_pss(process.pid))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a hung loader, and workers it left
    process.wait()
    return peak


def family_pss(pid: int) -> int:
    """Bytes of a process and all below it; what they share counts once."""
    return sum(map(pss, family(pid)))


def pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
