"""A file held by one process: how two runs of a command keep out of each other's folder."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["alone_in", "hold", "waited_for"]

_HELD_BY_ANOTHER = {errno.EWOULDBLOCK, errno.EACCES}


def hold(file: IO[Any] | int) -> bool:
    """Hold an open, writable file, or its descriptor, until it is closed or the process ends.

    False where another process, or this one by another opening, holds it. A system or file system
    without such locks keeps nobody out.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _HELD_BY_ANOTHER
    return True


@contextlib.contextmanager
def waited_for(file: IO[Any] | int) -> Iterator[None]:
    """Hold an open, writable file, or a descriptor, until the block ends; wait for others first.

    A system or file system without such locks lets all in.
    """
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let one process at a time do something with a folder; others wait.

    A system or file system without such locks lets all in.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with waited_for(descriptor):
            yield
    finally:
        os.close(descriptor)
