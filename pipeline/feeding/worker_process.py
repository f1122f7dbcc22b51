"""A loader worker as its parent sees it: a process, a socket and buffers.

If Ctrl-C interrupts a start or an end, calling `end` again completes it. Garbage collection does
too: a worker whose socket is closed ends.
"""

import contextlib
import marshal
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import IO

from tokenfeed.pipeline.errors import LoaderError
from tokenfeed.pipeline.feeding.worker import (
    Failure,
    Orders,
    Reply,
    Request,
    command,
    environment,
    map_buffer,
    not_importable,
)
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.windows.maker import WindowMaker

BUFFERS = 3
"""Buffers of each worker: one in use, one ready, one being filled. With one worker and a GPU, the
copies of the last window may still run."""

END_S = 5.0
"""Seconds to wait for killed workers. A worker that hangs in the kernel ends when its disk answers;
nothing waits longer for it."""

_NEEDS_NONE = "Use fewer workers; `num_workers`=0 reads in this process."
_FAULTS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS")

Register = Callable[[mmap.mmap], Callable[[], None]]
"""Page-locks the memory of a buffer for a device; returns the function that unlocks it."""


@dataclass(slots=True, eq=False)
class Pending:
    """A window that a worker is making or has made."""

    position: Position
    worker: "WorkerProcess"
    buffer: int
    answer: Reply | Failure | None = None
    """The reply or failure; None while the worker is busy. A failure is raised when its window is
    next."""

    def is_answered(self) -> bool:
        """Return whether the worker has answered."""
        return self.answer is not None

    def __str__(self) -> str:
        epoch, window, _ = self.position
        name, pid = self.worker.name, self.worker.process.pid
        return f"loader worker {name} (process {pid}), at window {window} of epoch {epoch},"


class WorkerProcess:
    """One process, its socket and its buffers."""

    def __init__(self, name: int, maker: WindowMaker) -> None:
        """Start the process.

        Raises:
            LoaderError: The system refuses the process, memory or a descriptor, or the class of a
                store or the function of `map` cannot be imported.
        """
        self.name = name
        self.tasks: deque[Pending] = deque()
        self.free = list(range(BUFFERS))
        self._memory: dict[int, mmap.mmap] = {}
        self._unregister: dict[int, Callable[[], None]] = {}
        self._parent = os.getpid()
        try:
            with contextlib.ExitStack() as undo:
                self._buffers = [undo.enter_context(_memory_file()) for _ in range(BUFFERS)]
                self.socket, theirs = Pipe()
                undo.enter_context(self.socket)
                self.process = self._start(maker, theirs)
                self._resources = undo.pop_all()
        except OSError as error:
            raise LoaderError(
                f"loader worker {name} cannot be started: {error.strerror}. {_NEEDS_NONE}"
            ) from error

    def _start(self, maker: WindowMaker, theirs: Connection) -> "subprocess.Popen[bytes]":
        with theirs, _memory_file() as file:
            buffers = [buffer.fileno() for buffer in self._buffers]
            marshal.dump([str(entry) for entry in sys.path if isinstance(entry, str)], file)
            try:
                pickle.dump(Orders(self._parent, maker, buffers), file)
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise not_importable(error) from error
            file.seek(0)
            handed = (theirs.fileno(), file.fileno())
            return subprocess.Popen(
                command(*handed), pass_fds=(*handed, *buffers), env=environment()
            )

    def begin(self, pending: Pending) -> None:
        """Send a request for a window."""
        self.tasks.append(pending)
        with contextlib.suppress(ConnectionError):  # it died: `collect` reports it
            self.socket.send(Request(pending.position, pending.buffer))

    def collect(self) -> None:
        """Receive an answer, or mark all requests as failed if the worker died."""
        try:
            answer = self.socket.recv()
            self.tasks.popleft().answer = answer
        except (EOFError, OSError):  # it may have died within a message
            reason = self._why_it_died()
            for pending in self.tasks:
                pending.answer = Failure(LoaderError(f"{pending} died {reason}"), "")
            self.tasks.clear()

    def buffer_memory(self, buffer: int, size: int, register: Register | None) -> mmap.mmap:
        """Return the memory of a buffer. The worker may have enlarged it."""
        memory = self._memory.get(buffer)
        if memory is None or len(memory) != size:
            self._unregister.pop(buffer, _nothing)()
            memory = self._memory[buffer] = map_buffer(self._buffers[buffer].fileno(), size)
            if register:
                self._unregister[buffer] = register(memory)
        return memory

    def kill(self) -> None:
        """Kill the process. Nothing is lost, because any worker can make its windows again."""
        if self.is_ours():
            self.process.kill()

    def end(self, deadline: float) -> None:
        """Kill the process, wait for its end until `deadline`, and release the shared memory.

        In a forked child, the process and the page locks are the parent's and stay.
        """
        self.kill()
        if self.is_ours():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, deadline - time.monotonic()))
            while self._unregister:
                self._unregister.popitem()[1]()
        self._resources.close()
        self.tasks.clear()  # they refer back to this object, which would delay freeing
        self._memory.clear()

    def is_ours(self) -> bool:
        """Return whether this process started the worker. It is False in a forked child."""
        return os.getpid() == self._parent

    def _why_it_died(self) -> str:
        """Return how the process ended, and a remedy."""
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "(it closed its socket). `num_workers`=0 reads in this process."
        if code >= 0:
            return (
                f"(exit status {code}). See its error above; `num_workers`=0 reads in this process."
            )
        ended = f"(killed by signal {-code}, {signal.strsignal(-code)})."
        if -code in (signal.SIGKILL, signal.SIGBUS):
            return (
                f"{ended} Often the machine ran out of memory: use fewer workers (`num_workers`)."
            )
        return f"{ended} With PYTHONFAULTHANDLER=1 in the environment a crash shows its traceback."


def _memory_file() -> IO[bytes]:
    """Return a file without a name that other processes can map. On Linux it is in memory."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tokenfeed"), "w+b")
    return tempfile.TemporaryFile()


def start_undisturbed(work: Callable[[], None]) -> None:
    """Start workers in a separate thread, and wait for it.

    Ctrl-C interrupts only the main thread, where it could lose a process that was just started. The
    new processes inherit the signal mask of the thread, which blocks all signals except crashes.

    Raises:
        LoaderError: The system refuses another thread, or `work` raised it.
    """
    failures: list[BaseException] = []

    def run() -> None:
        faults = {signal.Signals[name] for name in _FAULTS if name in signal.Signals.__members__}
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="tokenfeed starts workers")
    try:
        thread.start()
    except RuntimeError as error:
        raise LoaderError(f"loader workers cannot be started: {error}. {_NEEDS_NONE}") from error
    thread.join()
    if failures:
        raise failures[0]


def _nothing() -> None:
    pass
