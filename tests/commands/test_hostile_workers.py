"""Workers under signals, kills, forks and interruptions: no wrong token, no hang, none stays."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import warm
from delivery import (
    PREAMBLE,
    eventually,
    is_alive,
    open_files,
    open_loader,
    opened_since,
    realistic_lengths,
    workers_of,
)

from tokenfeed.pipeline.errors import LoaderError
from tokenfeed.pipeline.feeding import window_source


def start(script: str, folder: Path) -> warm.Popen:
    """A script in a session of its own, when it has said that it is ready."""
    pipe, words = subprocess.PIPE, ["-c", PREAMBLE + script, folder]
    process = warm.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")
def test_a_worker_that_no_kill_ends_does_not_hold_up_its_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process in the kernel's hands is: the kill works when its disk answers."""
    monkeypatch.setattr(window_source, "END_S", 0.1, raising=False)
    before = open_files()
    with open_loader(folder, num_workers=1, epochs=None, timeout=60) as loader:
        next(iter(loader))
        [pid] = workers_of()
        loader._delivery._feed._pool._timeout = 0.1  # type: ignore[union-attr]
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "kill", lambda process: None)
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(LoaderError, match=rf"\(process {pid}\).* did not answer within"):
                list(loader)
        assert is_alive(pid)
        assert opened_since(before) == []
        os.kill(pid, signal.SIGCONT)
        assert eventually(lambda: not is_alive(pid)), "its socket is closed"


ASKING = [
    *("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM"),
    *("SIGPROF", "SIGXCPU", "SIGXFSZ", "SIGIO", "SIGPWR", "SIGSTKFLT", "SIGRTMIN", "SIGRTMAX"),
    *("SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGPIPE"),
]
HANDLE = """
for name in NAMES:
    signal.signal(getattr(signal, name), lambda *_: None)
tokens = 0
for step, batch in enumerate(open_loader(num_workers=2, epochs=3)):
    tokens += batch.num_tokens
    if step == 40:  # both workers made windows by now
        print("ready", flush=True)
        sys.stdin.readline()
print(tokens)
"""


def test_no_signal_to_the_process_group_ends_a_worker_if_the_parent_handles_it(
    folder: Path,
) -> None:
    with start(HANDLE.replace("NAMES", repr(ASKING)), folder) as process:
        for name in ASKING:
            os.killpg(process.pid, getattr(signal, name))
        rest, errors = process.communicate("go on\n", timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert int(rest) == 3 * realistic_lengths().sum()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (signal.SIGKILL, "killed by signal 9, Killed). Often the machine ran out of memory"),
        (signal.SIGSEGV, "killed by signal 11, Segmentation fault). With PYTHONFAULTHANDLER=1"),
    ],
)
def test_what_to_do_about_a_dead_worker_depends_on_the_signal(
    folder: Path, number: int, remedy: str
) -> None:
    with open_loader(folder, num_workers=1, epochs=None) as loader:
        next(iter(loader))
        [worker] = workers_of()
        os.kill(worker, number)
        with pytest.raises(LoaderError) as caught:
            list(loader)
    assert remedy in str(caught.value)


ORPHANS = """
loader = open_loader(num_workers=2, epochs=None)
next(iter(loader))
if os.fork() == 0:
    signal.pause()  # as a DataLoader's worker: it has a copy of every socket
print("ready", flush=True)
signal.pause()
"""


def test_no_worker_outlives_a_killed_parent_though_a_fork_of_it_lives(folder: Path) -> None:
    with start(ORPHANS, folder) as process:
        workers = workers_of(process.pid)
        assert len(workers) == 2
        process.kill()
        process.wait()
        try:
            assert eventually(lambda: not any(is_alive(pid) for pid in workers))
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_hung_worker_in_the_middle_of_an_answer_cannot_be(folder: Path) -> None:
    """An answer is one packet: there is no half of one to wait for."""
    with open_loader(folder, num_workers=1) as loader:
        next(iter(loader))
        [worker] = loader._delivery._feed._pool._workers  # type: ignore[union-attr]
        assert worker.socket.type == socket.SOCK_SEQPACKET
