"""A file held by one process: how two runs of a command keep out of each other's folder."""

import errno
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["hold"]

_HELD_BY_ANOTHER = {errno.EWOULDBLOCK, errno.EACCES}


def hold(file: IO[Any]) -> bool:
    """Hold an open, writable file until it is closed, at the latest when the process ends.

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
