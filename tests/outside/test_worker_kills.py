"""Loader workers and training processes that are killed: an error at once, and nothing is left."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import psutil
import pytest
from support import warm
from support.delivery import PREAMBLE, open_loader, realistic_lengths, spans
from support.processes import eventually, is_alive, memfds, workers_of

from tokenfeed.pipeline.errors import LoaderError

forked = pytest.mark.usefixtures("forked_workers")


@forked
@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (signal.SIGKILL, "killed by signal 9, Killed). Often the machine ran out of memory"),
        (signal.SIGSEGV, "killed by signal 11, Segmentation fault). With PYTHONFAULTHANDLER=1"),
    ],
)
def test_a_killed_worker_is_named_at_once_with_a_remedy(
    folder: Path, number: int, remedy: str
) -> None:
    with open_loader(folder, num_workers=2, epochs=None, timeout=600) as loader:
        feed = iter(loader)
        next(feed)
        pid = max(workers_of())
        os.kill(pid, number)
        started = time.monotonic()
        message = rf"loader worker \d \(process {pid}\), at window \d+ of epoch \d+, died \(killed"
        with pytest.raises(LoaderError, match=message) as caught:
            list(feed)
        assert time.monotonic() - started < 60, "it waited for the timeout"
        assert remedy in str(caught.value)
        assert "\n" not in str(caught.value)


@forked
def test_after_a_killed_worker_the_loop_goes_on_where_it_stopped(folder: Path) -> None:
    """Through more windows than there are slots, so that the dead one is asked again."""
    whole = [spans(batch) for batch in open_loader(folder, epochs=4)]
    delivered = []
    with open_loader(folder, num_workers=2, epochs=4) as loader:
        delivered += [spans(batch) for batch in islice(loader, 5)]
        os.kill(workers_of()[0], signal.SIGKILL)
        with pytest.raises(LoaderError):
            delivered.extend(spans(batch) for batch in loader)
        delivered += [spans(batch) for batch in loader]
    assert delivered == whole


ORPHANS = """
loader = open_loader(num_workers=2, epochs=None)
for step, batch in enumerate(loader):
    if step == 3:
        if os.fork() == 0:
            signal.pause()  # as a DataLoader's worker: it has a copy of every socket
        print("ready", flush=True)
        time.sleep(600)
"""


def start(script: str, folder: Path) -> warm.Popen:
    """A script in a session of its own, when it has printed that it is ready."""
    pipe, words = subprocess.PIPE, ["-c", PREAMBLE + script, folder]
    process = warm.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Files of shared memory that processes have open or mapped, without temporary files."""
    found = {
        path
        for pid in pids
        for path in (
            *(file.path for file in psutil.Process(pid).open_files()),
            *(part.path for part in psutil.Process(pid).memory_maps()),
        )
    }
    temporary = tempfile.gettempdir()
    return {Path(path) for path in found if path.startswith("/dev/shm/") and temporary not in path}


def test_nothing_outlives_a_killed_training_process_though_a_fork_lives(folder: Path) -> None:
    with start(ORPHANS, folder) as process:
        workers = workers_of(process.pid)
        assert len(workers) == 2
        shared = shared_memory((process.pid, *workers))
        ours = {str(pid) for pid in (process.pid, *workers)}
        assert memfds() >= ours
        process.kill()
        process.wait()  # not for the ends of its pipes, which workers hold as well
        try:
            assert eventually(lambda: not any(is_alive(pid) for pid in workers))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert eventually(lambda: not memfds() & ours)
    assert not [path for path in shared if path.exists()]


ASKING = [
    *("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM"),
    *("SIGPROF", "SIGXCPU", "SIGXFSZ", "SIGIO", "SIGPWR", "SIGSTKFLT", "SIGRTMIN", "SIGRTMAX"),
    *("SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGPIPE"),
]
HANDLE = """
for name in NAMES:
    signal.signal(getattr(signal, name), lambda *_: None)
loader = open_loader(num_workers=1, epochs=3)
tokens = 0
for step, batch in enumerate(loader):
    tokens += batch.num_tokens
    if step == 40:  # one worker makes windows, and another one starts
        loader.num_workers = 2
        print("ready", flush=True)
        sys.stdin.readline()
print(tokens)
"""


def test_workers_ignore_signals_that_their_parent_handles(folder: Path) -> None:
    """Terminals and schedulers signal the whole process group, also while a worker starts."""
    script = HANDLE.replace("NAMES", repr(ASKING))
    with start(script, folder) as process:
        for name in ASKING:
            os.killpg(process.pid, getattr(signal, name))
        rest, errors = process.communicate("go on\n", timeout=300)
    assert (process.returncode, errors) == (0, "")
    assert int(rest) == 3 * realistic_lengths().sum()
