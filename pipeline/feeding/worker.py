"""A loader worker: a process that makes windows for a training process, in memory both can see.

It is a program of its own, not a fork: it inherits no CUDA handle, no lock and no copy of the
model, and imports no torch. It ends when its socket closes, so nothing outlives a killed parent;
the memory is anonymous (memfd), so nothing is left behind either. Terminals and schedulers signal
workers as well, but whether the run ends is the parent's decision: a worker begins with SIGINT and
SIGTERM blocked, and leaves it so. Torch-free.
"""

import mmap
import os
import pickle
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import NamedTuple

from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.pipeline.planning.job import Job
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.share import Header

__all__ = ["ENVIRONMENT", "Failure", "Made", "Task", "command", "map_slot"]

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""Keeps freed memory in the process: a window's arrays are as large as those of the one before, so
their pages need not come from the kernel again: 17 page faults a window, where there were 4,646."""

_GROWTH = 1.25  # a slot that was too small gets this much more than it needs
_PAGE = 1 << 21


class Task(NamedTuple):
    """Make the share of a window in one of the worker's slots."""

    position: Position
    slot: int


class Made(NamedTuple):
    """It is made."""

    header: Header
    size: int
    """Bytes of the slot."""
    seconds: float


class Failure(NamedTuple):
    """It could not be made."""

    error: TokenfeedError | None
    """What the user should know, or None for a bug of ours."""
    traceback: str


def command(socket_fd: int, job_fd: int) -> list[str]:
    """The command line of a worker that finds the same modules as this process."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from tokenfeed.pipeline.feeding.worker import main; main({socket_fd}, {job_fd})"
    )
    return [sys.executable, "-c", code]


def map_slot(fd: int, size: int) -> mmap.mmap:
    """The memory of a slot."""
    return mmap.mmap(fd, size)


def main(socket_fd: int, job_fd: int) -> None:
    """Serve tasks until the parent closes the socket."""
    connection = Connection(socket_fd)
    with open(job_fd, "rb") as file:
        job, slot_fds = pickle.load(file)
    slots = [_Slot(fd) for fd in slot_fds]
    try:
        while True:
            task: Task = connection.recv()
            connection.send(_serve(job, task, slots[task.slot]))
    except (EOFError, ConnectionError):
        os._exit(os.EX_OK)  # the parent is gone, or wants no more


def _serve(job: Job, task: Task, slot: "_Slot") -> Made | Failure:
    started = time.perf_counter()
    try:
        share = job.read(task.position)
        header = share.write(slot.at_least(share.num_bytes))
        return Made(header, slot.size, time.perf_counter() - started)
    except TokenfeedError as error:
        return Failure(error, "")
    except Exception:  # a bug: the parent raises it with this worker's traceback
        return Failure(None, traceback.format_exc())


class _Slot:
    """Anonymous shared memory that grows to the largest share it held."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory: mmap.mmap | None = None
        self.size = 0

    def at_least(self, size: int) -> memoryview:
        """The memory, at least `size` bytes of it."""
        if self._memory is None or self.size < size:
            self.size = -(-int(size * _GROWTH) // _PAGE) * _PAGE
            os.ftruncate(self._fd, self.size)
            self._memory = map_slot(self._fd, self.size)
        return memoryview(self._memory)
