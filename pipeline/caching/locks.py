"""Locks between the processes of a node, which the kernel releases when their owner ends.

They are locks of byte ranges of a file; the bytes need not exist. A killed process leaves no lock
behind. Torch-free.
"""

import contextlib
import errno
import os
import struct
import time
from collections.abc import Iterator

from tokenfeed.pipeline.format.storage import hold

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["exclusive", "try_lock"]

_FLOCK = struct.Struct("hhqqi4x")  # kind, from where, first byte, number of bytes, process
_IS_HELD = (errno.EAGAIN, errno.EACCES)
_LOOK_AGAIN_S, PATIENCE_S = 0.001, 30.0
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)


@contextlib.contextmanager
def try_lock(path: str, first: int, count: int) -> Iterator[bool]:
    """Lock bytes `first` to `first + count - 1` of a file; yield whether that succeeded.

    It fails if another thread or process holds one of the bytes. Without support for such locks, or
    without disk space for the file, it always succeeds: then two processes may fetch the same data,
    which is slower but correct.
    """
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
    except OSError:
        yield True
        return
    try:
        yield _lock(descriptor, first, count)
    finally:
        os.close(descriptor)  # this releases the lock


def _lock(descriptor: int, first: int, count: int) -> bool:
    if fcntl is None or not hasattr(fcntl, "F_OFD_SETLK"):
        return True
    try:
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
    except OSError as error:
        return error.errno not in _IS_HELD
    return True


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[int]:
    """Open a file with an exclusive lock among all threads and processes; yield the descriptor.

    Waits for the lock for at most 30 seconds, because its holder may be a stopped process.
    """
    descriptor = os.open(path, _FLAGS, 0o600)
    give_up_s = time.monotonic() + PATIENCE_S
    try:
        while not hold(descriptor) and time.monotonic() < give_up_s:
            time.sleep(_LOOK_AGAIN_S)
        yield descriptor
    finally:
        os.close(descriptor)
