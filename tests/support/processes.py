"""Processes of this system: scripts, children, open files, waits for an event."""

import contextlib
import gc
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil


def children_of(pid: int | Literal["self"]) -> list[int]:
    """Processes that a process started and has not waited for."""
    try:  # a list of each thread in /proc misses children of a thread that ends meanwhile
        return [child.pid for child in psutil.Process(None if pid == "self" else pid).children()]
    except psutil.NoSuchProcess:
        return []


def workers_of(pid: int | Literal["self"] = "self") -> list[int]:
    """Loader workers among the children of a process."""
    return [
        child
        for child in children_of(pid)
        if child in _forked or b"loader worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


_forked: set[int] = set()


class ForkedChild(subprocess.Popen[bytes]):
    """A child that is a fork of this process, which has imported what a loader worker needs."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        handed, environment, stdin, stdout = rest[3], rest[5], rest[9], rest[12]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            self.pid = os.fork()
        _forked.add(self.pid)
        if self.pid == 0:
            try:
                gc.disable()  # nothing of the parent is freed here
                os.dup2(stdin, 0)
                os.dup2(stdout, 1)
                _close_all_but({0, 1, 2, *handed})
                os.environ.update(environment)
                sys.argv = args[2:]
                exec(args[2], {})
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self._close_pipe_fds(*rest[9:15])  # type: ignore[attr-defined]
        self._child_created = True


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            if int(name) not in kept:
                os.close(int(name))


FORKING = SimpleNamespace(Popen=ForkedChild, TimeoutExpired=subprocess.TimeoutExpired)
"""What `pipeline.processes` takes for `subprocess` to fork loader workers: a program would import
for a quarter of a second."""


def run_script(
    script: str, *arguments: object, flags: Iterable[str] = (), seconds: float = 600
) -> Any:
    """Run a Python script to its end and read its last line as JSON; null if it wrote nothing."""
    ended = subprocess.run(
        [sys.executable, *flags, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return json.loads((ended.stdout.splitlines() or ["null"])[-1])


def eventually(what: Callable[[], bool], seconds: float = 300.0) -> bool:
    """Whether something callable becomes true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.05)
    return False


def is_alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def memfds() -> set[str]:
    """Anonymous shared memory of loaders that any process still has open."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if "memfd:tokenfeed" in os.readlink(path):
                found.add(path.parts[2])
    return found


def open_files() -> list[str]:
    """What this process has open."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(link for link in links if not link.startswith("/proc/"))


def opened_since(before: list[str]) -> list[str]:
    """What is open and was not; what others, as servers, have closed since is no matter."""
    return sorted((Counter(open_files()) - Counter(before)).elements())


def free_ports(count: int = 1) -> list[int]:
    """Ports that nobody has. So much above each is another, which SeaweedFS takes, too.

    They are below the ports that the system gives to programs which ask for any port: a server
    takes seconds until it listens, and meanwhile no other test gets its ports.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            port = 12_000 + secrets.randbelow(_SEPARATE)
            with contextlib.suppress(OSError):
                for each in (port, port + _SEPARATE):
                    held.enter_context(socket.create_server(("127.0.0.1", each)))
                found.append(port)
    return found


_SEPARATE = 10_000


def resident(pid: int | str) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
