"""A loader worker: a process that makes windows for a training process, in shared memory.

It is a separate program, not a fork: it inherits no CUDA handle, no lock and no copy of the model,
and it does not import torch. It ends when its socket closes or its parent has ended, so no worker
outlives a killed parent. The files of its memory have no names, so nothing stays behind. Terminals
and schedulers send signals to workers too, but only the parent decides when the run ends: a worker
keeps all signals blocked except those of a crash. Torch-free.
"""

import contextlib
import errno
import mmap
import os
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.errors import LoaderError, TokenfeedError
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.remote.client import own_process
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import Header
from tokenfeed.pipeline.windows.reader import WindowReader

if TYPE_CHECKING:
    from tokenfeed.pipeline.caching.node import Fetched


_DEFAULTS = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "2",  # memory freed by fetching threads is reused for the next window
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "OMP_NUM_THREADS": "1",  # else importing numpy starts a thread per core in every worker
    "OPENBLAS_NUM_THREADS": "1",
}
"""Keeps freed memory in the process. The arrays of a window are about as large as those of the last
window, so the kernel need not map new pages: 17 page faults per window instead of 4,646."""

_GROWTH = 1.25  # factor by which a buffer grows beyond the required size
_PAGE = 1 << 21
_LONGEST_TRACEBACK = 1 << 14
_PARENT_CHECK_S = 1.0  # a socket stays open while any fork of the parent lives
_SCHEDULING = Path("/proc/self/schedstat")

_REFUSALS = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG)
_USE_LESS = "Use fewer workers (`num_workers`), or raise the limits that `ulimit -a` names."


class Orders(NamedTuple):
    """What a worker receives at its start."""

    parent: int
    maker: WindowMaker
    buffers: list[int]
    """File descriptors of the buffers."""


class Request(NamedTuple):
    """Make a rank's slice of a window in one of the worker's buffers."""

    position: Position
    buffer: int


class Reply(NamedTuple):
    """The window was made."""

    header: Header
    size: int
    """Bytes of the buffer."""
    seconds: float
    """Seconds it took, without waiting for a core."""
    fetched: "Fetched | None"
    """Counts of reads from stores since the last reply; None for local data."""


class Failure(NamedTuple):
    """The window could not be made."""

    error: TokenfeedError | None
    """The error for the user; None for a bug in tokenfeed."""
    traceback: str


def command(socket_fd: int, orders_fd: int) -> list[str]:
    """Return the command line of a worker.

    The file `orders_fd` contains the module search path, and then the orders of the worker. Only
    built-in modules are imported before the path is set.
    """
    code = (
        f"import sys, marshal; file = open({orders_fd}, 'rb'); sys.path[:] = marshal.load(file); "
        f"from tokenfeed.pipeline.feeding.worker import main; main({socket_fd}, file)"
    )
    return [sys.executable, "-c", code]


def environment() -> dict[str, str]:
    """Return the environment of a worker: one thread per library, and freed memory is kept."""
    return _DEFAULTS | os.environ | _ENVIRONMENT


def map_buffer(fd: int, size: int) -> mmap.mmap:
    """Map the memory of a buffer.

    Raises:
        LoaderError: The system refuses this much memory.
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
            f"a window needs {size:,} bytes of shared memory, but the system refused them "
            f"({error.strerror}). {_USE_LESS}"
        ) from error


def not_importable(error: Exception) -> LoaderError:
    """Return the error for a store or function that a worker cannot import."""
    return LoaderError(
        f"loader workers cannot import the store or function of the loader ({error}). "
        "Define it in a separate module, or read in this process (`num_workers`=0)."
    )


def main(socket_fd: int, file: BinaryIO) -> None:
    """Make windows until the parent closes the socket or ends."""
    connection = Connection(socket_fd)
    own_process()
    try:
        orders = _read_orders(file, connection)
        buffers = [_Buffer(fd) for fd in orders.buffers]
        counter = _Counter(orders.maker.reader)
        while True:
            task = _next_task(connection, orders.parent)
            connection.send(_serve(orders.maker, task, buffers[task.buffer], counter))
    except (EOFError, ConnectionError):
        os._exit(os.EX_OK)  # the parent has ended or closed the socket


def _read_orders(file: BinaryIO, connection: Connection) -> Orders:
    """Read the orders. If a class cannot be imported, answer every request with that error."""
    try:
        with file:
            orders: Orders = pickle.load(file)
    except (AttributeError, ImportError) as error:
        failure = Failure(not_importable(error), "")
        while True:  # until the parent closes the socket
            connection.recv()
            connection.send(failure)
    return orders


def _next_task(connection: Connection, parent: int) -> Request:
    """Wait for a request. Raise EOFError if there will be no more."""
    while not wait([connection], _PARENT_CHECK_S):
        if os.getppid() not in (parent, 0):  # 0: it lives in an outer PID namespace
            raise EOFError
    task: Request = connection.recv()
    return task


def _serve(
    maker: WindowMaker, task: Request, buffer: "_Buffer", counter: "_Counter"
) -> Reply | Failure:
    started, waited_s = time.perf_counter(), _waited_for_core_s()
    try:
        rank_slice = maker.make(task.position)
        header = rank_slice.write(buffer.at_least(rank_slice.num_bytes))
        waited_s = _waited_for_core_s() - waited_s
        seconds = max(0.0, time.perf_counter() - started - waited_s)
        return Reply(header, buffer.size, seconds, counter.new())
    except TokenfeedError as error:
        return Failure(error, "")
    except MemoryError:
        return Failure(LoaderError(f"a loader worker ran out of memory. {_USE_LESS}"), "")
    except Exception:  # a bug: the parent raises it with this worker's traceback
        return Failure(None, traceback.format_exc()[-_LONGEST_TRACEBACK:])


def _waited_for_core_s() -> float:
    """Return the seconds in which this process was ready to run but had no core; 0 if unknown.

    CPU time would not include waiting for the disk, which more workers can reduce.
    """
    try:
        return int(_SCHEDULING.read_bytes().split()[1]) / 1e9
    except OSError:
        return 0.0


class _Counter:
    """Counts a reader's reads from stores between two replies."""

    def __init__(self, reader: WindowReader) -> None:
        self._reader = reader
        self._last = reader.fetched

    def new(self) -> "Fetched | None":
        """Return the counts since the last call."""
        before, self._last = self._last, self._reader.fetched
        return self._last.since(before) if self._last and before else None


class _Buffer:
    """Anonymous shared memory that grows to the size of the largest slice."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory: mmap.mmap | None = None
        self.size = 0

    def at_least(self, size: int) -> memoryview:
        """Return the memory, with at least `size` bytes."""
        if self._memory is None or self.size < size:
            size = round_up(int(size * _GROWTH), _PAGE)
            with _refusals_explained(size):
                os.ftruncate(self._fd, size)
            self._memory, self.size = map_buffer(self._fd, size), size
        return memoryview(self._memory)
