"""The node cache on disk: its size, its files, and which of them are removed when it is full.

    v1/
      .bytes .evict        the size of the cache; the lock of the process that sweeps
      SET/                 one split of one data set
        .locks .used       a process locks byte i to fetch record batch i; time of the last read
        ends/SHARD         the footer of a shard
        HH/BATCH           the bytes of a record batch; HH spreads them over folders

All processes of the node read and write these files, one per record batch. A file gets its name
when it is complete. Files are not synced: a checksum finds what a power cut damaged, and the record
batch is fetched again. A file may be removed while a process reads it: the process reads its open
file to the end, and later readers fetch the data again.

`sweep` removes the files that the plan reads last. For example, the plan reads record batch 7 in 2
windows, batch 9 in 40 windows, and batch 12 in no window of this epoch or the next: batch 12 goes
first, then batch 9. Torch-free.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError, error_line
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.storage import exclusive, try_lock
from tokenfeed.pipeline.format.store import FetchingStore, RangedStore
from tokenfeed.pipeline.planning.plan import NEVER, Plan


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Settings of one cache, the same in all processes of a run."""

    folder: str
    bytes: int
    """Largest size in bytes."""
    is_whole: bool
    """Whether all data fits. Then data is fetched in few large requests."""
    windows_ahead: int
    """Number of windows to prefetch."""


VARIABLE = "TOKENFEED_CACHE"
_VERSION = "v1"
_MOST_BYTES, _SHARE_OF_FREE = 10_000_000_000, 0.05
"""Default size: the smaller of these bytes and this share of the free disk."""
_MOST_AHEAD_BYTES, _SHARE_AHEAD = 1_000_000_000, 0.25
_WINDOWS = 3
"""Windows that must fit: the current windows of a fast and of a slow rank, and the next window."""
_log = logging.getLogger(__name__)


def resolve_cache(
    cache_dir: str | PathLike[str] | None,
    cache_bytes: int | None,
    *,
    total_bytes: int,
    window_bytes: int,
) -> CacheSettings | None:
    """Return the settings of the cache; None for no cache.

    Args:
        cache_dir: Folder of the cache. None: $TOKENFEED_CACHE, or a folder of this user in the
            system's temporary folder.
        cache_bytes: Largest size in bytes. 0: no cache. None: a share of the free disk.
        total_bytes: Bytes of all data that is read through the cache.
        window_bytes: Bytes of an average window, at least 1.

    Raises:
        ConfigError: The cache is too small for the data, or the disk for the cache.
    """
    if cache_bytes is not None and not checks.whole("cache_bytes", cache_bytes):
        return None
    folder = _folder(cache_dir)
    least_bytes = min(total_bytes, _WINDOWS * window_bytes)  # less would fetch data repeatedly
    free = shutil.disk_usage(folder).free + Budget(folder).read()
    most = min(_MOST_BYTES, int(free * _SHARE_OF_FREE)) if cache_bytes is None else cache_bytes
    if cache_bytes is None and most < least_bytes:
        _log.warning(
            "%s has %s bytes free, too few for a cache of %s bytes: record batches are not cached "
            "on disk. Set `cache_dir` to a disk with more free space.",
            *(folder, f"{free:,}", f"{least_bytes:,}"),
        )
        return None
    if most < least_bytes:
        raise ConfigError(
            f"`cache_bytes`={most}: {_WINDOWS} windows of this data set take "
            f"{least_bytes:,} bytes. Raise it to that, lower `window_tokens`, or set it to 0 "
            "to use no disk cache."
        )
    if (wanted := min(most, total_bytes)) > free:
        raise ConfigError(
            f"`cache_bytes`={most}: {folder} has {free:,} bytes free, and the cache would use "
            f"{wanted:,}. Lower `cache_bytes`, to {least_bytes:,} or more, or set `cache_dir` "
            "to another disk."
        )
    ahead_bytes = min(_MOST_AHEAD_BYTES, int(most * _SHARE_AHEAD))
    windows_ahead = max(1, ahead_bytes // window_bytes)
    return CacheSettings(folder, most, total_bytes <= most, windows_ahead)


def _folder(cache_dir: str | PathLike[str] | None) -> str:
    """Return the folder of the cache; create it if it is missing.

    Raises:
        ConfigError: The folder cannot be created, or belongs to another user.
    """
    given = cache_dir or os.environ.get(VARIABLE)
    setting = "`cache_dir`" if cache_dir else f"${VARIABLE}" if given else "the cache's folder"
    place = Path(given or Path(tempfile.gettempdir()) / f"tokenfeed-{os.getuid()}").absolute()
    try:
        (place / _VERSION).mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = place.stat().st_uid
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        why = error_line(error)
        raise ConfigError(f"{setting}={place}: {why}. Choose a writable folder.") from None
    if not given and owner != os.getuid():
        raise ConfigError(f"{place} belongs to another user. Set `cache_dir` to your own folder.")
    return str(place / _VERSION)


def cache_for(
    sources: tuple[OpenedSplit, ...],
    plan: Plan,
    cache_dir: str | PathLike[str] | None,
    cache_bytes: int | None,
) -> CacheSettings | None:
    """Return the settings of the cache for sources of which some are in stores; None for no cache.

    Raises:
        ConfigError: The cache is too small for the plan, or the disk for the cache.
    """
    total = window = 0
    largest = [
        max(batches) for batches in zip(*(s.batches for s in plan.order.stretches), strict=True)
    ]
    for source, read in zip(sources, largest, strict=True):
        if isinstance(source.store, RangedStore):
            size = sum(shard.bytes for shard in source.split.shards)
            total += 0 if isinstance(source.store, FetchingStore) else size
            window += int(size * read / source.batches)
    return resolve_cache(cache_dir, cache_bytes, total_bytes=total, window_bytes=max(1, window))


_FILE = ".bytes"
_SUM = struct.Struct("<q")
_UNKNOWN = 1 << 60
"""Larger than any bound, so the first added file starts a sweep, which counts the cache."""


class Budget:
    """Size of the cache in bytes, kept in a small file that all processes share.

    A killed process can leave a wrong size. Every sweep counts the files and corrects it.
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, _FILE)

    def read(self) -> int:
        """Return the size; 0 if it is unknown."""
        try:
            total = self.add(0)
        except OSError:
            return 0
        return total if total < _UNKNOWN else 0

    def add(self, count: int) -> int:
        """Add `count` bytes, and return the new size."""
        with exclusive(self._path) as descriptor:
            total = _read(descriptor) + count
            if count:
                os.pwrite(descriptor, _SUM.pack(total), 0)
            return total


def _read(descriptor: int) -> int:
    """Return the stored size; `_UNKNOWN` for a new file and for an impossible value."""
    stored = os.pread(descriptor, _SUM.size, 0)
    total = int(_SUM.unpack(stored)[0]) if len(stored) == _SUM.size else _UNKNOWN
    return total if 0 <= total <= 2 * _UNKNOWN else _UNKNOWN


Until = Callable[[np.ndarray], np.ndarray]
"""Maps numbers of pieces to the number of windows until each is read; shape (K,), int64, both."""
FIRST_END = 1 << 48
"""Number of the footer of shard 0. Record batches have smaller numbers."""

ENDS = "ends"
"""Name of the folder of footers in a set."""

_NUMBER = re.compile("0|[1-9a-f][0-9a-f]{,11}")
_KEPT_SHARE = 0.9
"""Share of the bound that a sweep keeps, so that the next files need no sweep."""
_STALE_S = 600.0
"""Age in seconds at which a temporary file counts as abandoned."""
_UNUSED_S = 3600.0
"""Seconds without a read after which a set is removed first."""
_GONE = 1 << 50
"""Stands for "windows until read" in an unused set: larger than `NEVER`."""


def sweep(folder: str, bound: int, until: dict[str, Until]) -> int:
    """Remove files until the cache is at 90 % of its bound, those first whose next read is furthest
    away.

    Args:
        folder: Folder of the cache.
        bound: Largest size of the cache in bytes.
        until: For each set of this run, by name: windows until its pieces are read.

    Returns:
        Bytes that are left.
    """
    total, paths, sizes = 0, [], []
    sets: dict[str, np.ndarray] = {}
    for name in _folders(folder):
        stays, found = _files(f"{folder}/{name}")
        total += stays + sum(piece.size for piece in found)
        paths += [piece.path for piece in found]
        sizes += [piece.size for piece in found]
        sets[name] = np.array([piece.number for piece in found], np.int64)
    for nth in np.argsort(-_until_of_all(folder, sets, until), kind="stable").tolist():
        if total <= bound * _KEPT_SHARE:
            break
        with contextlib.suppress(OSError):
            os.unlink(paths[nth])
            total -= sizes[nth]
    return total


def _until_of_all(folder: str, sets: dict[str, np.ndarray], until: dict[str, Until]) -> np.ndarray:
    """Return the windows until each piece is read, set by set, shape (K,).

    This process does not know the plans of other runs. It spreads the pieces of their sets evenly
    over the time until its own last read, so that each run loses its share.
    """
    known = {name: until[name](numbers) for name, numbers in sets.items() if name in until}
    own = np.concatenate([*known.values(), np.zeros(1, np.int64)])
    most = int(own[own < NEVER].max())
    found = [np.zeros(0)]
    for name, numbers in sets.items():
        if name in known:
            found.append(known[name])
        elif _is_used(f"{folder}/{name}"):
            found.append(np.linspace(most, 0, len(numbers)))
        else:
            found.append(np.full(len(numbers), _GONE))
    return np.concatenate(found)


def _is_used(folder: str) -> bool:
    try:
        return time.time() - os.stat(f"{folder}/.used").st_mtime < _UNUSED_S
    except OSError:
        return False


def _folders(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        yield from (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


class _Piece(NamedTuple):
    """A file of a set: a record batch or a footer."""

    path: str
    number: int
    size: int


def _files(folder: str) -> tuple[int, list[_Piece]]:
    """Return the bytes of temporary files in the folder of a set, and its complete files.

    Files with other names are not the cache's and are ignored.
    """
    stays, pieces = 0, []
    for name in _folders(folder):
        first = FIRST_END if name == ENDS else 0
        with os.scandir(f"{folder}/{name}") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    size = _size(entry)
                    if "." in entry.name:
                        stays += size
                    elif _is_piece(name, entry.name):
                        pieces.append(_Piece(entry.path, first + int(entry.name, 16), size))
    return stays, pieces


def _is_piece(folder: str, name: str) -> bool:
    """Return whether a name is that of a record batch or a footer in this folder."""
    return bool(_NUMBER.fullmatch(name)) and folder in (ENDS, f"{int(name, 16) & 255:02x}")


def _size(entry: "os.DirEntry[str]") -> int:
    """Return the bytes of a file. Remove an abandoned temporary file and return 0."""
    found = entry.stat()
    if "." in entry.name and time.time() - found.st_mtime > _STALE_S:
        os.unlink(entry.path)
        return 0
    return found.st_size


_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_PAUSE_S = 30.0
"""Seconds without writing after the disk refused a file."""


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
                self._budget.add(left - before)  # bytes that others add meanwhile stay counted


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
