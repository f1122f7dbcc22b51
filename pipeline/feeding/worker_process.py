"""A loader worker as its parent sees it: a child process and buffers.

If Ctrl-C interrupts an end, calling `end` again completes it. Garbage collection does too: a child
whose channel is closed ends.
"""

import contextlib
import mmap
import os
import pickle
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import IO

from tokenfeed.pipeline.errors import LoaderError
from tokenfeed.pipeline.feeding.worker import Reply, begin, make, map_buffer, not_importable
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.processes import Child, Ended, Failure
from tokenfeed.pipeline.windows.maker import WindowMaker

BUFFERS = 3
"""Buffers of each worker: one in use, one ready, one being filled. With one worker and a GPU, the
copies of the last window may still run."""

END_S = 5.0
"""Seconds to wait for killed workers. A worker that hangs in the kernel ends when its disk answers;
nothing waits longer for it."""

NEEDS_NONE = "Use fewer workers; `num_workers`=0 reads in this process."

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
        name, pid = self.worker.name, self.worker.child.process.pid
        return f"loader worker {name} (process {pid}), at window {window} of epoch {epoch},"


class WorkerProcess:
    """One child process and its buffers."""

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
                files = [undo.enter_context(_memory_file()) for _ in range(BUFFERS)]
                self._buffers = [file.fileno() for file in files]
                with _memory_file() as orders:  # may be more than a socket holds
                    _write_orders(maker, orders)
                    handed = orders.fileno(), self._buffers
                    self.child = Child("loader worker", [handed[0], *handed[1]])
                self.child.prepare(partial(begin, *handed))
                self._resources = undo.pop_all()
        except OSError as error:
            raise LoaderError(
                f"loader worker {name} cannot be started: {error.strerror}. {NEEDS_NONE}"
            ) from error

    def begin(self, pending: Pending) -> None:
        """Send a request for a window."""
        self.tasks.append(pending)
        self.child.call(partial(make, pending.position, pending.buffer))

    def collect(self) -> None:
        """Receive an answer, or mark all requests as failed if the worker died."""
        try:
            answer = self.child.answer()
            self.tasks.popleft().answer = answer
        except Ended:
            reason = self._why_it_died()
            for pending in self.tasks:
                pending.answer = Failure(LoaderError(f"{pending} died {reason}"))
            self.tasks.clear()

    def buffer_memory(self, buffer: int, size: int, register: Register | None) -> mmap.mmap:
        """Return the memory of a buffer. The worker may have enlarged it."""
        memory = self._memory.get(buffer)
        if memory is None or len(memory) != size:
            self._unregister.pop(buffer, _nothing)()
            memory = self._memory[buffer] = map_buffer(self._buffers[buffer], size)
            if register:
                self._unregister[buffer] = register(memory)
        return memory

    def kill(self) -> None:
        """Kill the process. Nothing is lost, because any worker can make its windows again."""
        if self.is_ours():
            self.child.kill()

    def end(self, deadline: float) -> None:
        """Kill the process, wait for its end until `deadline`, and release the shared memory.

        In a forked child, the process and the page locks are the parent's and stay.
        """
        self.kill()
        if self.is_ours():
            self.child.wait(max(0.0, deadline - time.monotonic()))
            while self._unregister:
                self._unregister.popitem()[1]()
        self.child.close()
        self._resources.close()
        self.tasks.clear()  # they refer back to this object, which would delay freeing
        self._memory.clear()

    def is_ours(self) -> bool:
        """Return whether this process started the worker. It is False in a forked child."""
        return os.getpid() == self._parent

    def _why_it_died(self) -> str:
        """Return how the process ended, and a remedy."""
        try:
            code = self.child.process.wait(timeout=1)
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


def _write_orders(maker: WindowMaker, file: IO[bytes]) -> None:
    try:
        pickle.dump(maker, file)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise not_importable(error) from error
    file.seek(0)


def _nothing() -> None:
    pass
