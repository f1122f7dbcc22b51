"""A loader worker: a child process that makes windows for a training process, in shared memory.

Both ends are here: `Worker` makes windows in the child, and `WorkerProcess` is the child as its
parent sees it. Each worker has a few buffers: files without names, which both ends map, so nothing
stays behind. `pipeline.processes` starts the child and ends it. Torch-free.

If Ctrl-C interrupts an end, calling `end` again completes it. Garbage collection does too: a child
whose channel is closed ends.
"""

import contextlib
import errno
import mmap
import os
import pickle
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.errors import LoaderError
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.processes import Child, Ended, Failure
from tokenfeed.pipeline.remote.client import own_process
from tokenfeed.pipeline.windows.maker import WindowMaker

if TYPE_CHECKING:
    from tokenfeed.pipeline.caching.node import Fetched


BUFFERS = 3
"""Buffers of each worker: one in use, one ready, one being filled. With one worker and a GPU, the
copies of the last window may still run."""
NEEDS_NONE = "Use fewer workers; `num_workers`=0 reads in this process."

_GROWTH = 1.25  # factor by which a buffer grows beyond the required size
_PAGE = 1 << 21
_SCHEDULING = Path("/proc/self/schedstat")

_REFUSALS = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EMFILE, errno.ENFILE)
_USE_LESS = "Use fewer workers (`num_workers`), or raise the limits that `ulimit -a` names."

Register = Callable[[mmap.mmap], Callable[[], None]]
"""Page-locks the memory of a buffer for a device; returns the function that unlocks it."""


class Reply(NamedTuple):
    """The window was made."""

    size: int
    """Bytes of the buffer."""
    seconds: float
    """Seconds it took, without waiting for a core."""
    fetched: "Fetched | None"
    """Counts of reads from stores since the last reply; None for local data."""


class Worker:
    """Makes windows in buffers that another process has mapped, too."""

    def __init__(self, maker: WindowMaker, buffers: Sequence[int]) -> None:
        """`buffers`: their file descriptors."""
        self._maker = maker
        self._files = buffers
        self._memory: dict[int, mmap.mmap] = {}
        self._fetched = maker.reader.fetched

    def make(self, position: Position, buffer: int) -> Reply:
        """Make a rank's slice of a window in a buffer.

        Raises:
            TokenfeedError: The window cannot be made, or there is too little memory.
        """
        started, waited_s = time.perf_counter(), _waited_for_core_s()
        rank_slice = self._maker.make(position)
        memory = self._memory_of(buffer, rank_slice.num_bytes)
        rank_slice.write(memoryview(memory))
        waited_s = _waited_for_core_s() - waited_s
        seconds = max(0.0, time.perf_counter() - started - waited_s)
        before, self._fetched = self._fetched, self._maker.reader.fetched
        fetched = self._fetched.since(before) if self._fetched and before else None
        return Reply(len(memory), seconds, fetched)

    def _memory_of(self, buffer: int, size: int) -> mmap.mmap:
        """Return the memory of a buffer, which grows to the size of the largest slice."""
        memory = self._memory.get(buffer)
        if memory is None or len(memory) < size:
            size = round_up(int(size * _GROWTH), _PAGE)
            with _refusals_explained(size):
                os.ftruncate(self._files[buffer], size)
                memory = self._memory[buffer] = mmap.mmap(self._files[buffer], size)
        return memory


_worker: Worker | None = None


def begin(orders: int, buffers: Sequence[int]) -> None:
    """Make the worker of this process. The file `orders` has the pickled maker of windows.

    Raises:
        LoaderError: The class of a store or a function cannot be imported.
    """
    global _worker
    own_process()
    try:
        with open(orders, "rb") as file:
            maker = pickle.load(file)
    except (AttributeError, ImportError) as error:
        raise _not_importable(error) from error
    _worker = Worker(maker, buffers)


def make(position: Position, buffer: int) -> Reply:
    """See `Worker.make`."""
    assert _worker, "it has begun"
    return _worker.make(position, buffer)


def _waited_for_core_s() -> float:
    """Return the seconds in which this process was ready to run but had no core; 0 if unknown.

    CPU time would not include waiting for the disk, which more workers can reduce.
    """
    try:
        return int(_SCHEDULING.read_bytes().split()[1]) / 1e9
    except OSError:
        return 0.0


@dataclass(slots=True, eq=False)
class Pending:
    """A window that a worker is making or has made."""

    position: Position
    worker: "WorkerProcess"
    buffer: int
    answer: Reply | Failure | None = None
    """The reply or failure; None while the worker is busy. A failure is raised when its window is
    next."""

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

    def begin(self, position: Position) -> Pending:
        """Send a request for a window, to be made in a free buffer."""
        pending = Pending(position, self, self.free.pop())
        self.tasks.append(pending)
        self.child.call(partial(make, position, pending.buffer))
        return pending

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
        """Return the memory of a buffer. The worker may have enlarged it.

        Raises:
            LoaderError: The system refuses this much memory.
        """
        memory = self._memory.get(buffer)
        if memory is None or len(memory) != size:
            self._unregister.pop(buffer, _nothing)()
            with _refusals_explained(size):
                memory = self._memory[buffer] = mmap.mmap(self._buffers[buffer], size)
            if register:
                self._unregister[buffer] = register(memory)
        return memory

    def end(self, deadline: float, *, is_ours: bool) -> None:
        """Release the shared memory, after the end of the process, which was killed. Nothing is
        lost, because any worker can make its windows again.

        Args:
            deadline: Time until which to wait for the end of the process.
            is_ours: Whether this process has started the worker. In a forked child, the process and
                the page locks are the parent's and stay.
        """
        if is_ours:
            self.child.wait(max(0.0, deadline - time.monotonic()))
            while self._unregister:
                self._unregister.popitem()[1]()
        self.child.close()
        self._resources.close()
        self.tasks.clear()  # they refer back to this object, which would delay freeing
        self._memory.clear()

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


@contextlib.contextmanager
def _refusals_explained(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        raise LoaderError(
            f"a window needs {size:,} bytes of shared memory, but the system refused them "
            f"({error.strerror}). {_USE_LESS}"
        ) from error


def _memory_file() -> IO[bytes]:
    """Return a file without a name that other processes can map. On Linux it is in memory.

    A child has 0 to 2 of its own. This process may have closed them, so that a new file gets one.
    """
    file = _unnamed_file()
    if file.fileno() > 2:
        return file
    import fcntl  # not on Windows, where there are no workers

    with file:
        return os.fdopen(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 3), "w+b")


def _unnamed_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tokenfeed"), "w+b")
    return tempfile.TemporaryFile()


def _write_orders(maker: WindowMaker, file: IO[bytes]) -> None:
    try:
        pickle.dump(maker, file)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise _not_importable(error) from error
    file.seek(0)


def _not_importable(error: Exception) -> LoaderError:
    """Return the error for a store or function that a worker cannot import."""
    return LoaderError(
        f"loader workers cannot import the store or function of the loader ({error}). "
        "Define it in a separate module, or read in this process (`num_workers`=0)."
    )


def _nothing() -> None:
    pass
