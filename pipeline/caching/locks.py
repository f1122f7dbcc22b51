"""Locks between the processes of a node that end with their owner, however it ends.

The kernel keeps them, on bytes of a file that need not be there: nothing is left behind by a kill,
nothing has to be counted, and no name outlives a process. Torch-free.
"""

import contextlib
import errno
import os
import struct
import time
from collections.abc import Iterator

from tokenfeed.pipeline.format.locking import hold

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["alone", "try_lock"]

_FLOCK = struct.Struct("hhqqi4x")  # kind, from where, first byte, number of bytes, process
_IS_HELD = (errno.EAGAIN, errno.EACCES)
_LOOK_AGAIN_S, _PATIENCE_S = 0.001, 30.0
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)


@contextlib.contextmanager
def try_lock(path: str, first: int, count: int) -> Iterator[bool]:
    """Hold some numbers, if nobody else holds one of them, in this process or another.

    A system without such locks, or a disk without room for the file, keeps nobody out: then what
    they guard is done twice, and is right.
    """
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
    except OSError:
        yield True
        return
    try:
        yield _lock(descriptor, first, count)
    finally:
        os.close(descriptor)  # which frees them


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
def alone(path: str) -> Iterator[int]:
    """Be the only one to have a file, in any thread or process; others wait. Gives it open.

    Nobody waits for ever: who holds it may have been stopped.
    """
    descriptor = os.open(path, _FLAGS, 0o600)
    give_up_s = time.monotonic() + _PATIENCE_S
    try:
        while not hold(descriptor) and time.monotonic() < give_up_s:
            time.sleep(_LOOK_AGAIN_S)
        yield descriptor
    finally:
        os.close(descriptor)
