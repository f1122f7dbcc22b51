"""The files of the node cache: one per record batch, read and written by all processes.

    v1/
      .bytes .evict        the size of the cache; the lock of the process that sweeps
      SET/                 one split of one data set
        .locks .used       a process locks byte i to fetch record batch i; time of the last read
        ends/SHARD         the footer of a shard
        HH/BATCH           the bytes of a record batch; HH spreads them over folders

A file gets its name when it is complete. Files are not synced: a checksum finds what a power cut
damaged, and the record batch is fetched again. A file may be removed while a process reads it: the
process reads its open file to the end, and later readers fetch the data again. Torch-free.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from contextlib import AbstractContextManager

from tokenfeed.pipeline.caching.eviction import ENDS, Budget, Until, sweep
from tokenfeed.pipeline.caching.settings import CacheSettings
from tokenfeed.pipeline.format.storage import exclusive, try_lock

_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_PAUSE_S = 30.0
"""Seconds without writing after the disk refused a file."""
_log = logging.getLogger(__name__)


class NodeCache:
    """Writes and removes files, and keeps the cache below its bound."""

    def __init__(self, settings: CacheSettings, until: dict[str, Until]) -> None:
        """
        Args:
            settings: Folder and bound.
            until: For each set of record batches that this run reads: a function that returns in
                how many windows the run reads its pieces.
        """
        self.settings = settings
        self._until = until
        self._budget = Budget(settings.folder)
        self._paused_until = 0.0
        self._has_warned = False

    @property
    def is_paused(self) -> bool:
        """Return whether writing is paused after a disk error."""
        return time.monotonic() < self._paused_until

    def write(self, path: str, data: bytes) -> None:
        """Write a file. A disk error pauses the cache but does not end the run."""
        if self.is_paused:
            return
        temporary = f"{path}.{os.getpid()}.{threading.get_ident()}"
        try:
            _write(
                temporary, data
            )  # before it is counted, so that a sweep finds every counted file
            if self._budget.add(len(data)) > self.settings.bytes:
                self._sweep()
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            self.pause(error)

    def remove(self, path: str) -> None:
        """Remove a damaged file."""
        with contextlib.suppress(OSError):
            size = os.stat(path).st_size
            os.unlink(path)
            self._budget.add(-size)

    def pause(self, error: OSError) -> None:
        """Pause writing after a disk error. Log a warning for the first error only."""
        self._paused_until = time.monotonic() + _PAUSE_S
        if not self._has_warned:
            self._has_warned = True
            no_room = error.errno in _NO_ROOM
            remedy = "Free disk space, or lower `cache_bytes`"
            remedy = remedy if no_room else "Choose another `cache_dir`"
            _log.warning(
                "%s: the cache cannot be written (%s): record batches are fetched from the store "
                "each time. %s.",
                *(self.settings.folder, error.strerror, remedy),
            )

    def _sweep(self) -> None:
        with exclusive(os.path.join(self.settings.folder, ".evict")):
            if (before := self._budget.add(0)) > self.settings.bytes:
                left = sweep(self.settings.folder, self.settings.bytes, self._until)
                self._budget.correct(before, left)


class CacheSet:
    """The files of one split of one data set."""

    def __init__(self, cache: NodeCache, name: str) -> None:
        self.cache = cache
        self._folder = os.path.join(cache.settings.folder, name)
        try:
            os.makedirs(os.path.join(self._folder, ENDS), mode=0o700, exist_ok=True)
        except OSError as error:
            cache.pause(error)

    def touch(self) -> None:
        """Mark the set as used now; unused sets are removed first."""
        with contextlib.suppress(OSError), open(os.path.join(self._folder, ".used"), "w"):
            pass

    def batch(self, number: int) -> str:
        """Return the path of a record batch."""
        return f"{self._folder}/{number & 255:02x}/{number:x}"

    def end(self, shard: int) -> str:
        """Return the path of a shard's footer."""
        return f"{self._folder}/{ENDS}/{shard:x}"

    def lock(self, first: int, count: int = 1) -> AbstractContextManager[bool]:
        """Lock record batches for fetching. Yield whether the lock was free."""
        return try_lock(f"{self._folder}/.locks", first, count)


def read_file(path: str) -> bytes | None:
    """Return the bytes of a file; None if it is missing or cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return None


def _write(path: str, data: bytes) -> None:
    try:
        descriptor = os.open(path, _NEW, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        descriptor = os.open(path, _NEW, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
