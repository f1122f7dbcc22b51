"""A loader worker as its parent sees it: a process, a socket, some slots; how it starts and ends.

A start or an end that something broke into, Ctrl-C too, can be finished by calling `end` again, or
by garbage collection: a worker without a socket ends.
"""

import contextlib
import marshal
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from tokenfeed.pipeline.errors import ConfigError, LoaderError
from tokenfeed.pipeline.feeding.worker import (
    Failure,
    Orders,
    Reply,
    Request,
    Waiting,
    command,
    environment,
    map_slot,
    not_importable,
    receive,
    send,
)
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.windows.maker import WindowMaker

__all__ = [
    "END_S",
    "SLOTS",
    "Pending",
    "Register",
    "WorkerProcess",
    "check_workers_can_run",
    "start_undisturbed",
]

SLOTS = 3
"""Of each worker: one in use, one ready, one being made; with a single worker on a GPU the copies
of the window before may still run."""

END_S = 5.0
"""Seconds that killed workers get to end. Those that hang in the kernel hear of the kill when their
disk answers, and end then: nobody waits for that."""

_NEEDS_NONE = "Use fewer workers; `num_workers`=0 needs none, and reads in this process."
_FAULTS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS")

Register = Callable[[mmap.mmap], Callable[[], None]]
"""Prepares the memory of a slot for a device; returns what undoes it."""


def check_workers_can_run() -> None:
    """Refuse workers where they cannot run.

    Raises:
        ConfigError: No Python is there to start as a program, or no memfd.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        why = "this program is frozen or embedded, so it has no Python to start them with"
    elif not hasattr(os, "memfd_create"):
        why = f"they share memory by memfd_create, which {sys.platform} or this Python lacks"
    else:
        return
    raise ConfigError(f"loader workers cannot run here: {why}. `num_workers`=0 needs none.")


@dataclass(slots=True, eq=False)
class Pending:
    """A window that a worker makes or has made."""

    position: Position
    worker: "WorkerProcess"
    slot: int
    answer: Reply | Failure | None = None
    """A failure is raised when its window's turn has come."""

    def is_answered(self) -> bool:
        """Whether it was made, or failed."""
        return self.answer is not None

    def __str__(self) -> str:
        epoch, window, _ = self.position
        name, pid = self.worker.name, self.worker.process.pid
        return f"loader worker {name} (process {pid}), at window {window} of epoch {epoch},"


class WorkerProcess:
    """One process, its socket and its slots."""

    def __init__(self, name: int, maker: WindowMaker) -> None:
        """Start it.

        Raises:
            LoaderError: The system refuses the process, its memory or a descriptor; or a policy or
                a store is of a class that is not found by a name.
        """
        self.name = name
        self.leaving = False
        self.heard_s = 0.0
        """When it last said that it waits for a store, by the monotonic clock."""
        self.tasks: deque[Pending] = deque()
        self.free = list(range(SLOTS))
        self._memory: dict[int, mmap.mmap] = {}
        self._unregister: dict[int, Callable[[], None]] = {}
        self._parent = os.getpid()
        try:
            with contextlib.ExitStack() as undo:
                self._slots = [undo.enter_context(_memory_file()) for _ in range(SLOTS)]
                self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.enter_context(self.socket)
                self.process = self._start(maker, theirs)
                self._resources = undo.pop_all()
        except OSError as error:
            raise LoaderError(
                f"loader worker {name} cannot be started: {error.strerror}. {_NEEDS_NONE}"
            ) from error

    def _start(self, maker: WindowMaker, theirs: socket.socket) -> "subprocess.Popen[bytes]":
        with theirs, _memory_file() as file:
            slots = [slot.fileno() for slot in self._slots]
            marshal.dump([str(entry) for entry in sys.path if isinstance(entry, str)], file)
            try:
                pickle.dump(Orders(self._parent, maker, slots), file)
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise not_importable(error) from error
            file.seek(0)
            handed = (theirs.fileno(), file.fileno())
            return subprocess.Popen(command(*handed), pass_fds=(*handed, *slots), env=environment())

    def begin(self, pending: Pending) -> None:
        """Ask for a window."""
        self.tasks.append(pending)
        with contextlib.suppress(ConnectionError):  # it died: the missing answer will say so
            send(self.socket, Request(pending.position, pending.slot))

    def collect(self) -> None:
        """Take in an answer, or that there will be none."""
        try:
            answer = receive(self.socket)
            if isinstance(answer, Waiting):
                self.heard_s = time.monotonic()
            else:
                self.tasks.popleft().answer = answer
        except (EOFError, ConnectionError):
            reason = self._why_it_died()
            for pending in self.tasks:
                pending.answer = Failure(LoaderError(f"{pending} died {reason}"), "")
            self.tasks.clear()

    def slot_memory(self, slot: int, size: int, register: Register | None) -> mmap.mmap:
        """The memory of a slot, which the worker may have enlarged."""
        memory = self._memory.get(slot)
        if memory is None or len(memory) != size:
            self._unregister.pop(slot, _nothing)()
            memory = self._memory[slot] = map_slot(self._slots[slot].fileno(), size)
            if register:
                self._unregister[slot] = register(memory)
        return memory

    def kill(self) -> None:
        """Have the process end at once: a window can be made again, so nothing is lost."""
        if self.is_ours():
            self.process.kill()

    def end(self, deadline: float) -> None:
        """Kill the process, wait for its end until `deadline`, and let go of all that is shared.

        In a forked child the process and its memory stay: they are the parent's.
        """
        self.kill()
        if self.is_ours():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, deadline - time.monotonic()))
            while self._unregister:
                self._unregister.popitem()[1]()
        self._resources.close()
        self.tasks.clear()  # they point back here, and the memory shall go at once
        self._memory.clear()

    def is_ours(self) -> bool:
        """Whether this process started it; a fork of that one did not."""
        return os.getpid() == self._parent

    def _why_it_died(self) -> str:
        """How the process ended, and what to do about it."""
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "(it closed its socket). `num_workers`=0 reads in this process."
        if code >= 0:
            return f"(exit status {code}). It says above why; `num_workers`=0 needs no workers."
        ended = f"(killed by signal {-code}, {signal.strsignal(-code)})."
        if -code in (signal.SIGKILL, signal.SIGBUS):
            return (
                f"{ended} Often the machine ran out of memory: use fewer workers (`num_workers`)."
            )
        return f"{ended} With PYTHONFAULTHANDLER=1 in the environment a crash shows its traceback."


def _memory_file() -> BinaryIO:
    """A file without a name, in memory that other processes can be given."""
    return os.fdopen(os.memfd_create("tokenfeed"), "w+b")


def start_undisturbed(work: Callable[[], None]) -> None:
    """Start workers in a thread for that alone, and wait for it.

    Ctrl-C breaks into the main thread only, where it would lose a process that has just begun. And
    what the thread blocks its processes begin with: every signal that asks for something.

    Raises:
        LoaderError: There can be no more threads, or what `work` raised.
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
