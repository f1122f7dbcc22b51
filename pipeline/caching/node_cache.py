"""The cache of a node: files of record batches, one each, that all its processes read and write.

    v1/
      .bytes .evict        the sum of all sizes; held by whoever sweeps
      SET/                 one split of one data set
        .locks .used       byte i is locked by whoever fetches record batch i; when it was last read
        ends/SHARD         the footer of a shard
        HH/BATCH           the bytes of a record batch; HH spreads them over folders

A file gets its name when it is whole. Nothing is synced: what a power cut leaves is found by its
checksum, as is any damage, and fetched again. A file may go while it is read: who has it open reads
on, and who comes later fetches it. Torch-free.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from contextlib import AbstractContextManager

from tokenfeed.pipeline.caching.eviction import ENDS, Budget, Until, sweep
from tokenfeed.pipeline.caching.locks import alone, try_lock
from tokenfeed.pipeline.caching.settings import CacheSettings

__all__ = ["CacheSet", "NodeCache", "read_file"]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_PAUSE_S = 30.0
"""After the disk refused a file, how long no other is tried."""
_log = logging.getLogger(__name__)


class NodeCache:
    """Bounded: before a file gets its name its bytes are counted, and those go that are read
    last."""

    def __init__(self, settings: CacheSettings, until: dict[str, Until]) -> None:
        """
        Args:
            settings: Where, and how much.
            until: Of each own set, when its pieces are read next.
        """
        self.settings = settings
        self._until = until
        self._budget = Budget(settings.folder)
        self._paused_until = 0.0
        self._has_told = False

    @property
    def is_paused(self) -> bool:
        """Whether the disk takes nothing at present."""
        return time.monotonic() < self._paused_until

    def write(self, path: str, data: bytes) -> None:
        """Keep a file, if the disk has room: a cache that fails costs requests, and no run."""
        if self.is_paused:
            return
        temporary = f"{path}.{os.getpid()}.{threading.get_ident()}"
        try:
            _write(temporary, data)  # before it is counted: a sweep finds what the sum has
            if self._budget.add(len(data)) > self.settings.bytes:
                self._sweep()
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            self.pause(error)

    def remove(self, path: str) -> None:
        """Let go of a damaged file."""
        with contextlib.suppress(OSError):
            size = os.stat(path).st_size
            os.unlink(path)
            self._budget.add(-size)

    def pause(self, error: OSError) -> None:
        """Write nothing for a while, since the disk refused; told once."""
        self._paused_until = time.monotonic() + _PAUSE_S
        if not self._has_told:
            self._has_told = True
            no_room = error.errno in _NO_ROOM
            remedy = "it room, or a lower `cache_bytes`" if no_room else "another `cache_dir`"
            _log.warning(
                "%s: the cache cannot be written (%s): record batches come from the store each "
                "time. Give %s.",
                *(self.settings.folder, error.strerror, remedy),
            )

    def _sweep(self) -> None:
        with alone(os.path.join(self.settings.folder, ".evict")):
            if (before := self._budget.add(0)) > self.settings.bytes:
                left = sweep(self.settings.folder, self.settings.bytes, self._until)
                self._budget.correct(before, left)


class CacheSet:
    """The files of one split of one data set."""

    def __init__(self, cache: NodeCache, name: str) -> None:
        self._cache = cache
        self._folder = os.path.join(cache.settings.folder, name)
        try:
            os.makedirs(os.path.join(self._folder, ENDS), mode=0o700, exist_ok=True)
        except OSError as error:
            cache.pause(error)

    def touch(self) -> None:
        """Say that the set is in use: one that nobody reads goes first."""
        with contextlib.suppress(OSError), open(os.path.join(self._folder, ".used"), "w"):
            pass

    @property
    def is_paused(self) -> bool:
        """Whether nothing can be kept at present."""
        return self._cache.is_paused

    def batch(self, number: int) -> str:
        """The path of a record batch."""
        return f"{self._folder}/{number & 255:02x}/{number:x}"

    def end(self, shard: int) -> str:
        """The path of a shard's footer."""
        return f"{self._folder}/{ENDS}/{shard:x}"

    def write(self, path: str, data: bytes) -> None:
        """Keep a file."""
        self._cache.write(path, data)

    def remove(self, path: str) -> None:
        """Let go of a damaged file."""
        self._cache.remove(path)

    def lock(self, first: int, count: int = 1) -> AbstractContextManager[bool]:
        """Hold the right to fetch some record batches, if nobody else does."""
        return try_lock(f"{self._folder}/.locks", first, count)


def read_file(path: str) -> bytes | None:
    """A file's bytes; None where there is none, or it cannot be read."""
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
