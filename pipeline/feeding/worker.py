"""A loader worker: a child process that makes windows for a training process, in shared memory.

`pipeline.processes` starts and ends it. The files of its memory have no names, so nothing stays
behind. Torch-free.
"""

import contextlib
import errno
import mmap
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.errors import LoaderError
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.remote.client import own_process
from tokenfeed.pipeline.windows.maker import WindowMaker

if TYPE_CHECKING:
    from tokenfeed.pipeline.caching.node import Fetched


_GROWTH = 1.25  # factor by which a buffer grows beyond the required size
_PAGE = 1 << 21
_SCHEDULING = Path("/proc/self/schedstat")

_REFUSALS = (errno.ENOMEM, errno.ENOSPC, errno.EFBIG)
_USE_LESS = "Use fewer workers (`num_workers`), or raise the limits that `ulimit -a` names."


class Reply(NamedTuple):
    """The window was made."""

    size: int
    """Bytes of the buffer."""
    seconds: float
    """Seconds it took, without waiting for a core."""
    fetched: "Fetched | None"
    """Counts of reads from stores since the last reply; None for local data."""


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


class Worker:
    """Makes windows in buffers that another process has mapped, too."""

    def __init__(self, maker: WindowMaker, buffers: Sequence[int]) -> None:
        """`buffers`: their file descriptors."""
        self._maker = maker
        self._buffers = [_Buffer(fd) for fd in buffers]
        self._fetched = maker.reader.fetched

    def make(self, position: Position, buffer: int) -> Reply:
        """Make a rank's slice of a window in a buffer.

        Raises:
            TokenfeedError: The window cannot be made, or there is too little memory.
        """
        started, waited_s, memory = time.perf_counter(), _waited_for_core_s(), self._buffers[buffer]
        try:
            rank_slice = self._maker.make(position)
            rank_slice.write(memory.at_least(rank_slice.num_bytes))
        except MemoryError:
            raise LoaderError(f"a loader worker ran out of memory. {_USE_LESS}") from None
        waited_s = _waited_for_core_s() - waited_s
        seconds = max(0.0, time.perf_counter() - started - waited_s)
        before, self._fetched = self._fetched, self._maker.reader.fetched
        fetched = self._fetched.since(before) if self._fetched and before else None
        return Reply(memory.size, seconds, fetched)


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
        raise not_importable(error) from error
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
