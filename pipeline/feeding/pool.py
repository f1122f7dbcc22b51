"""Worker processes that make windows ahead of use, and hand them over in order.

Any worker can make any window, because a window is a pure function of its number; so their number
may change at any time and the order cannot. Each worker has a few slots of shared memory; a window
stays in its slot, and is read there, until its lease is released.
"""

import contextlib
import itertools
import mmap
import os
import pickle
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from tokenfeed.pipeline.errors import LoaderError
from tokenfeed.pipeline.feeding.source import Lease
from tokenfeed.pipeline.feeding.worker import ENVIRONMENT, Failure, Made, Task, command, map_slot
from tokenfeed.pipeline.planning.job import Job
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.share import Share

__all__ = ["WorkerPool"]

_SLOTS = 3
"""Of each worker: one in use, one ready, one being made; with a single worker on a GPU the copies
of the window before may still run."""

Register = Callable[[mmap.mmap], Callable[[], None]]
"""Prepares the memory of a slot for a device; returns what undoes it."""


class WorkerPool:
    """A `WindowSource` of worker processes."""

    def __init__(
        self,
        job: Job,
        start: Position,
        *,
        num_workers: int,
        timeout: float,
        register: Register | None = None,
    ) -> None:
        """Start the workers; they begin at once.

        Args:
            job: What to make.
            start: The first window, and how much of it was delivered before.
            num_workers: How many processes.
            timeout: Seconds to wait for a window before a worker counts as hung.
            register: Called with the memory of each slot, to page-lock it for a device.
        """
        self._job = job
        self._next = start
        self._timeout = timeout
        self._register = register
        self._names = itertools.count()
        self._workers: list[_Worker] = []
        self._pending: deque[_Pending] = deque()  # in the order of the windows
        try:
            self.resize(num_workers)
        except BaseException:
            self.close()
            raise

    @property
    def num_workers(self) -> int:
        """Processes that get new work."""
        return sum(not worker.leaving for worker in self._workers)

    def resize(self, num_workers: int) -> None:
        """Start more workers, or let some leave when what they made was used."""
        staying = [worker for worker in self._workers if not worker.leaving]
        for worker in staying[num_workers:]:
            worker.leaving = True
        for _ in range(num_workers - len(staying)):
            self._workers.append(_Worker(next(self._names), self._job))
        self._dismiss()
        self._assign()

    def take(self) -> Lease:
        """The next window.

        Raises:
            LoaderError: The worker died, or did not answer within the timeout; names the window.
            TokenfeedError: What the worker met.
        """
        self._assign()
        head = self._pending[0]
        made = self._answer_of(head)
        ready = sum(1 for _ in itertools.takewhile(lambda p: p.answer is not None, self._pending))
        self._pending.popleft()
        memory = head.worker.slot_memory(head.slot, made.size, self._register)
        share = Share.read(made.header, memoryview(memory))
        return Lease(share, made.seconds, ready, lambda: self._release(head))

    def is_ready(self) -> bool:
        """Whether the next window is made."""
        self._drain(0)
        return bool(self._pending) and self._pending[0].answer is not None

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._pending.clear()

    def _assign(self) -> None:
        """Give every free slot a window, workers with the least to do first."""
        while True:
            free = [worker for worker in self._workers if worker.free and not worker.leaving]
            if not free:
                return
            worker = max(free, key=lambda worker: len(worker.free))
            pending = _Pending(self._next, worker, worker.free.pop())
            self._pending.append(pending)
            self._next = self._job.plan.next_window(self._next)
            worker.begin(pending)

    def _answer_of(self, head: "_Pending") -> Made:
        """Wait until a window is made."""
        deadline = time.monotonic() + self._timeout
        while head.answer is None:
            self._drain(max(0.0, deadline - time.monotonic()))
            if head.answer is None and time.monotonic() >= deadline:
                raise LoaderError(
                    f"{head} did not answer within {self._timeout:g} s. The disk may hang; or "
                    "raise `timeout`."
                )
        if isinstance(head.answer, Made):
            return head.answer
        if head.answer.error:
            raise head.answer.error
        raise RuntimeError(f"{head} failed:\n{head.answer.traceback}")

    def _drain(self, timeout: float) -> None:
        """Take in whatever workers have answered; wait for one answer at most `timeout` seconds."""
        busy = {worker.connection: worker for worker in self._workers if worker.tasks}
        for connection in wait(list(busy), timeout):
            busy[connection].collect()  # type: ignore[index]

    def _release(self, pending: "_Pending") -> None:
        pending.worker.free.append(pending.slot)
        self._dismiss()
        if self._workers:
            self._assign()

    def _dismiss(self) -> None:
        """End workers that leave and whose slots are all free."""
        for worker in [w for w in self._workers if w.leaving and len(w.free) == _SLOTS]:
            self._workers.remove(worker)
            worker.end()


@dataclass(slots=True, eq=False)
class _Pending:
    """A window that a worker makes or has made."""

    position: Position
    worker: "_Worker"
    slot: int
    answer: Made | Failure | None = None
    """A failure is raised when its window's turn has come."""

    def __str__(self) -> str:
        epoch, window, _ = self.position
        name, pid = self.worker.name, self.worker.process.pid
        return f"loader worker {name} (process {pid}), at window {window} of epoch {epoch},"


class _Worker:
    """One process, its socket and its slots."""

    def __init__(self, name: int, job: Job) -> None:
        self.name = name
        self.leaving = False
        self.tasks: deque[_Pending] = deque()
        self.free = list(range(_SLOTS))
        self._fds = [os.memfd_create("tokenfeed") for _ in range(_SLOTS)]
        self._memory: dict[int, mmap.mmap] = {}
        self._unregister: dict[int, Callable[[], None]] = {}
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        with theirs, tempfile.TemporaryFile() as file:
            pickle.dump((job, self._fds), file)  # a socket's buffer would be too small for some
            file.seek(0)
            handed = (theirs.fileno(), file.fileno())
            with _signals_blocked():  # the worker inherits that, and keeps it
                self.process = self._start(command(*handed), (*handed, *self._fds))

    def _start(self, arguments: list[str], fds: tuple[int, ...]) -> "subprocess.Popen[bytes]":
        try:
            return subprocess.Popen(arguments, pass_fds=fds, env=os.environ | ENVIRONMENT)
        except OSError as error:
            self.connection.close()
            for fd in self._fds:
                os.close(fd)
            raise LoaderError(
                f"loader worker {self.name} cannot be started: {error.strerror}. Use fewer workers "
                "(`num_workers`); 0 reads in this process."
            ) from error

    def begin(self, pending: _Pending) -> None:
        """Ask for a window."""
        self.tasks.append(pending)
        with contextlib.suppress(
            ConnectionError
        ):  # it died: the answer that is missing will say so
            self.connection.send(Task(pending.position, pending.slot))

    def collect(self) -> None:
        """Take in an answer, or that there will be none."""
        try:
            self.tasks[0].answer = self.connection.recv()
            self.tasks.popleft()
        except (EOFError, ConnectionError):
            reason = self._exit_reason()
            for pending in self.tasks:
                error = LoaderError(
                    f"{pending} died ({reason}). Often the machine ran out of memory: use fewer "
                    "workers (`num_workers`)."
                )
                pending.answer = Failure(error, "")
            self.tasks.clear()

    def slot_memory(self, slot: int, size: int, register: Register | None) -> mmap.mmap:
        """The memory of a slot, which the worker may have enlarged."""
        memory = self._memory.get(slot)
        if memory is None or len(memory) != size:
            self._unregister.pop(slot, _nothing)()
            memory = self._memory[slot] = map_slot(self._fds[slot], size)
            if register:
                self._unregister[slot] = register(memory)
        return memory

    def _exit_reason(self) -> str:
        """How the process ended, in words."""
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    def end(self) -> None:
        """Close the socket, which ends the process; kill it if it does not hear."""
        self.connection.close()
        self.process.kill()
        self.process.wait()
        for undo in self._unregister.values():
            undo()
        for fd in self._fds:
            os.close(fd)
        self.tasks.clear()  # they point back here, and the memory shall go at once
        self._memory.clear()
        self._unregister.clear()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Hold back the signals that a worker must not end from."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing() -> None:
    pass
