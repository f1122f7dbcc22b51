"""A loader worker: a process that makes windows for a training process, in memory both can see.

It is a program of its own, not a fork: it inherits no CUDA handle, no lock and no copy of the
model, and imports no torch. It ends when its socket closes or its parent is gone, so nothing
outlives a killed parent; the memory is anonymous (memfd), so nothing is left behind either.
Terminals and schedulers signal workers as well, but whether the run ends is the parent's decision:
a worker begins with all signals blocked that ask for something, and leaves it so. Torch-free.
"""

import contextlib
import errno
import mmap
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.errors import LoaderError, TokenfeedError
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.remote.process import own_process
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import Header
from tokenfeed.pipeline.windows.reader import WindowReader

if TYPE_CHECKING:
    from tokenfeed.pipeline.caching.traffic import Fetched

__all__ = [
    "Failure",
    "Orders",
    "Reply",
    "Request",
    "Waiting",
    "command",
    "environment",
    "map_slot",
    "not_importable",
    "receive",
    "send",
]

_DEFAULTS = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "2",  # what threads that fetch have freed is there for the next window
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "OMP_NUM_THREADS": "1",  # importing numpy would start a thread a core, in every worker
    "OPENBLAS_NUM_THREADS": "1",
}
"""Keeps freed memory in the process: a window's arrays are as large as those of the one before, so
their pages need not come from the kernel again: 17 page faults a window, where there were 4,646."""

_GROWTH = 1.25  # a slot that was too small gets this much more than it needs
_PAGE = 1 << 21
_LONGEST = 1 << 16  # bytes of a message; an answer is some 2,000, a slot holds the rest
_LONGEST_TRACEBACK = 1 << 14
_TELL_EVERY_S = 1.0
_PARENT_CHECK_S = 1.0  # a socket stays open while any fork of the parent lives
_SCHEDULING = Path("/proc/self/schedstat")

_REFUSALS = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG)
_USE_LESS = "Use fewer workers (`num_workers`), or raise the limits that `ulimit -a` names."


class Orders(NamedTuple):
    """What a worker is told when it starts."""

    parent: int
    maker: WindowMaker
    slots: list[int]
    """Descriptors of the memory."""


class Request(NamedTuple):
    """Make a rank's slice of a window in one of the worker's slots."""

    position: Position
    slot: int


class Reply(NamedTuple):
    """It is made."""

    header: Header
    size: int
    """Bytes of the slot."""
    seconds: float
    """Time it took, waiting for a core not counted."""
    fetched: "Fetched | None"
    """What it took of stores since the reply before; None of local data."""


class Waiting(NamedTuple):
    """A store is waited for: it will answer, or its client will give up and say why."""


class Failure(NamedTuple):
    """It could not be made."""

    error: TokenfeedError | None
    """What the user should know, or None for a bug of ours."""
    traceback: str


def command(socket_fd: int, orders_fd: int) -> list[str]:
    """The command line of a worker; the file holds the module search path, then its orders.

    Nothing but built-in modules is imported before that path is set.
    """
    code = (
        f"import sys, marshal; file = open({orders_fd}, 'rb'); sys.path[:] = marshal.load(file); "
        f"from tokenfeed.pipeline.feeding.worker import main; main({socket_fd}, file)"
    )
    return [sys.executable, "-c", code]


def environment() -> dict[str, str]:
    """The environment of a worker: this one, set up for a single thread that keeps its memory."""
    return _DEFAULTS | os.environ | _ENVIRONMENT


def send(connection: socket.socket, message: "Request | Reply | Failure") -> None:
    """Send a message as one packet: it arrives whole or not at all."""
    connection.send(pickle.dumps(message))


def receive(connection: socket.socket) -> Any:
    """The next message.

    Raises:
        EOFError: The other end is closed.
    """
    if packet := connection.recv(_LONGEST):
        return pickle.loads(packet)
    raise EOFError


def map_slot(fd: int, size: int) -> mmap.mmap:
    """The memory of a slot.

    Raises:
        LoaderError: The system refuses so much.
    """
    with _refusals_explained(size):
        return mmap.mmap(fd, size)


@contextlib.contextmanager
def _refusals_explained(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        raise LoaderError(
            f"a window takes {size:,} bytes of shared memory, which the system refuses "
            f"({error.strerror}). {_USE_LESS}"
        ) from error


def not_importable(error: Exception) -> LoaderError:
    """The error for a policy or a store that does not reach a worker."""
    return LoaderError(
        f"loader workers cannot import a policy or store that the loader was given ({error}). "
        "Define its class in a module of its own, or read in this process (`num_workers`=0)."
    )


def main(socket_fd: int, file: BinaryIO) -> None:
    """Serve tasks until the parent closes the socket, or is gone."""
    connection = socket.socket(fileno=socket_fd)
    own_process()
    try:
        orders = _read_orders(file, connection)
        slots = [_Slot(fd) for fd in orders.slots]
        counter = _Counter(orders.maker.reader)
        _tell_of_waits(connection, orders.maker.reader)
        while True:
            task = _next_task(connection, orders.parent)
            send(connection, _serve(orders.maker, task, slots[task.slot], counter))
    except (EOFError, ConnectionError):
        os._exit(os.EX_OK)  # the parent is gone, or wants no more


def _read_orders(file: BinaryIO, connection: socket.socket) -> Orders:
    """What this worker is told; if it cannot import what that is made of, it answers so instead."""
    try:
        with file:
            orders: Orders = pickle.load(file)
    except (AttributeError, ImportError) as error:
        failure = Failure(not_importable(error), "")
        while True:  # until the parent closes the socket
            receive(connection)
            send(connection, failure)
    return orders


def _next_task(connection: socket.socket, parent: int) -> Request:
    """Wait for a task; EOFError when there will be none."""
    while not wait([connection], _PARENT_CHECK_S):
        if os.getppid() not in (parent, 0):  # 0: it lives in an outer PID namespace
            raise EOFError
    task: Request = receive(connection)
    return task


def _tell_of_waits(connection: socket.socket, reader: WindowReader) -> None:
    """Say every second that a store is waited for, as long as that is so, in a thread."""
    if reader.fetched is None:
        return
    message = pickle.dumps(Waiting())

    def tell() -> None:
        while True:
            time.sleep(_TELL_EVERY_S)
            if reader.is_waiting:
                with contextlib.suppress(OSError):  # the parent has heard enough, or is gone
                    connection.send(message, socket.MSG_DONTWAIT)

    Thread(target=tell, name="tokenfeed tells of waits", daemon=True).start()


def _serve(
    maker: WindowMaker, task: Request, slot: "_Slot", counter: "_Counter"
) -> Reply | Failure:
    started, waited_s = time.perf_counter(), _waited_for_core_s()
    try:
        rank_slice = maker.make(task.position)
        header = rank_slice.write(slot.at_least(rank_slice.num_bytes))
        waited_s = _waited_for_core_s() - waited_s
        seconds = max(0.0, time.perf_counter() - started - waited_s)
        return Reply(header, slot.size, seconds, counter.new())
    except TokenfeedError as error:
        return Failure(error, "")
    except MemoryError:
        return Failure(LoaderError(f"a loader worker ran out of memory. {_USE_LESS}"), "")
    except Exception:  # a bug: the parent raises it with this worker's traceback
        return Failure(None, traceback.format_exc()[-_LONGEST_TRACEBACK:])


def _waited_for_core_s() -> float:
    """Seconds in which this process could run, but had no core; 0 where the kernel keeps no count.

    Time of the CPU alone would leave out the disk, for which more workers are a remedy.
    """
    try:
        return int(_SCHEDULING.read_bytes().split()[1]) / 1e9
    except OSError:
        return 0.0


class _Counter:
    """What a reader takes of stores, from one reply to the next."""

    def __init__(self, reader: WindowReader) -> None:
        self._reader = reader
        self._told = reader.fetched

    def new(self) -> "Fetched | None":
        """What was not told yet."""
        told, self._told = self._told, self._reader.fetched
        return self._told.since(told) if self._told and told else None


class _Slot:
    """Anonymous shared memory that grows to the largest slice it held."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory: mmap.mmap | None = None
        self.size = 0

    def at_least(self, size: int) -> memoryview:
        """The memory, at least `size` bytes of it."""
        if self._memory is None or self.size < size:
            size = round_up(int(size * _GROWTH), _PAGE)
            with _refusals_explained(size):
                os.ftruncate(self._fd, size)
            self._memory, self.size = map_slot(self._fd, size), size
        return memoryview(self._memory)
