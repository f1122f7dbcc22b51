"""Commands that start warm end as others do: by a signal, with their caller, many at once."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO

import pytest
from support import warm
from support.processes import eventually, is_alive

THREADS, PROCESSES = 6, 60
SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(30)"


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a command does instead of its own work: the one item of this list."""
    done: list[str] = []
    start = warm.Popen
    monkeypatch.setattr(warm, "Popen", lambda _, **given: start(["-c", *done], **given))
    return done


def pid_said(stream: IO[str] | None) -> int:
    assert stream
    with stream:
        return int(stream.readline())


started = partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Path]:
    with warm.serve_commands(tmp_path / "bin"):
        yield tmp_path / "bin" / "shards"


@pytest.mark.parametrize(
    ("does", "expected"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)],
)
def test_the_exit_code_is_the_one_that_a_shell_would_tell(
    code: list[str], program: Path, does: str, expected: int
) -> None:
    code.append(does)
    assert subprocess.run([program]).returncode == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_whose_program_is_ended_ends(
    code: list[str], program: Path, number: signal.Signals
) -> None:
    code.append(SLEEPS)
    with started([program]) as caller:
        pid = pid_said(caller.stdout)
        caller.send_signal(number)
        assert eventually(lambda: not is_alive(pid), 15)


def test_the_server_ends_with_a_command_still_at_work(code: list[str], tmp_path: Path) -> None:
    code.append(SLEEPS)
    with warm.serve_commands(tmp_path / "bin"):
        caller = started([tmp_path / "bin" / "shards"])
        pid = pid_said(caller.stdout)
    assert not is_alive(pid)
    assert caller.wait() != 0


def ended(number: int) -> int:
    """A process that ends while other threads start theirs; whether it is told another code."""
    sleeps = f"import time; time.sleep({number % 7} / 500)"
    process = warm.Popen(["-c", f"{sleeps}; raise SystemExit(7)"])
    return process.wait() != 7 or process._process.exitcode != 7


def test_threads_that_start_and_await_processes_are_told_their_own_exit_codes() -> None:
    before, interval = dict(os.environ), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            assert sum(pool.map(ended, range(PROCESSES))) == 0
    finally:
        sys.setswitchinterval(interval)
    assert dict(os.environ) == before
