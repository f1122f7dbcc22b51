"""The node cache on disk: its size and its files.

    v2/
      .evict               the lock of the process that removes files
      kept/.bytes          the size of the files in this folder
      kept/SET/            one split of one data set
        .locks .used       a process locks byte i to fetch record batch i; time of the last read
        ends/SHARD         the footer of a shard
        HH/BATCH           the bytes of a record batch; HH spreads them over folders
      passing/             the same, for what `kept` has no room for

All processes of the node read and write these files, one per record batch. A file gets its name
when it is complete. Files are not synced: a checksum finds what a power cut damaged, and the record
batch is fetched again. A file may be removed while a process reads it: the process reads its open
file to the end, and later readers fetch the data again.

The cache keeps what it has. A file is put into `kept` while there is room, and stays there as long
as a run reads its set: an epoch reads every record batch about once, so no other choice has more
hits. What does not fit passes: the ranks of the node share it for a few windows, then the oldest
files go. Torch-free.
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
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError, error_line
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.storage import exclusive, try_lock
from tokenfeed.pipeline.format.store import FetchingStore, RangedStore
from tokenfeed.pipeline.planning.plan import Plan


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
    passing_bytes: int | None = None
    """Part of `bytes` for files that pass. None: a quarter."""

    def part(self, folder: str) -> int:
        """Return the largest size of one of the two folders in bytes."""
        passing = self.bytes // 4 if self.passing_bytes is None else self.passing_bytes
        return passing if folder == PASSING else self.bytes - passing


VARIABLE = "TOKENFEED_CACHE"
_VERSION = "v2"
KEPT, PASSING = "kept", "passing"
"""The two folders of the cache."""
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
    own = sum(Budget(os.path.join(folder, each)).read() for each in (KEPT, PASSING))
    free = shutil.disk_usage(folder).free + own
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
    is_whole = total_bytes <= most
    passing = _passing(most, total_bytes, (_WINDOWS + windows_ahead) * window_bytes)
    return CacheSettings(folder, most, is_whole, windows_ahead, passing)


def _passing(most: int, total: int, windows: int) -> int:
    """Return the bytes for files that pass: of the windows in use, what is not kept.

    Of `total` bytes of data, K are kept, in `most` bytes of cache: K + windows * (1 - K / total) =
    most. If all data fits, the spare bytes are for data of other runs.
    """
    if total <= most:
        return min(windows, most - total)
    if windows >= most:
        return most
    return most - (most - windows) * total // (total - windows)


def _folder(cache_dir: str | PathLike[str] | None) -> str:
    """Return the folder of the cache; create it if it is missing.

    Raises:
        ConfigError: The folder cannot be created, or belongs to another user.
    """
    if not isinstance(cache_dir, str | PathLike | None):
        raise checks.refusal("cache_dir", cache_dir, "a folder, or None")
    given = cache_dir or os.environ.get(VARIABLE)
    setting = "`cache_dir`" if cache_dir else f"${VARIABLE}" if given else "the cache's folder"
    place = Path(given or Path(tempfile.gettempdir()) / f"tokenfeed-{os.getuid()}").absolute()
    try:
        for each in (KEPT, PASSING):
            (place / _VERSION / each).mkdir(mode=0o700, parents=True, exist_ok=True)
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
        max(batches) for batches in zip(*(s.batches for s in plan.order.averages), strict=True)
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
    """Size of a folder of the cache in bytes, kept in a small file that all processes share.

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


FIRST_END = 1 << 48
"""Number of the footer of shard 0. Record batches have smaller numbers."""

ENDS = "ends"
"""Name of the folder of footers in a set."""

_NUMBER = re.compile("0|[1-9a-f][0-9a-f]{,11}")
_LEFT_SHARE = 0.9
"""Share of its bound that a sweep leaves in `passing`, so that the next files need no sweep."""
_STALE_S = 600.0
"""Age in seconds at which a temporary file counts as abandoned."""
_UNUSED_S = 3600.0
"""Seconds without a read after which a set may be removed."""


def sweep(folder: str, part: str, most: int) -> int:
    """Make room in a part of the cache.

    In `passing`, the oldest files go. In `kept`, the sets go that no run has read for an hour.

    Args:
        folder: Folder of the cache.
        part: `KEPT` or `PASSING`.
        most: Bytes that may be left in `passing`. In `kept`, unused sets go if it has more.

    Returns:
        Bytes that are left.
    """
    total = 0
    found: list[_Piece] = []
    for name in _folders(f"{folder}/{part}"):
        stays, pieces = _files(f"{folder}/{part}/{name}")
        total += stays + sum(piece.size for piece in pieces)
        if part == PASSING or not _is_used(f"{folder}/{KEPT}/{name}"):
            found += pieces
    for piece in sorted(found, key=lambda piece: piece.written):
        if total <= most:
            break
        with contextlib.suppress(OSError):
            os.unlink(piece.path)
            total -= piece.size
    return total


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
    size: int
    written: int
    """Time in nanoseconds."""


def _files(folder: str) -> tuple[int, list[_Piece]]:
    """Return the bytes of temporary files in the folder of a set, and its complete files.

    Files with other names are not the cache's and are ignored.
    """
    stays, pieces = 0, []
    for name in _folders(folder):
        with os.scandir(f"{folder}/{name}") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    size = _size(entry)
                    if "." in entry.name:
                        stays += size
                    elif _is_piece(name, entry.name):
                        pieces.append(_Piece(entry.path, size, entry.stat().st_mtime_ns))
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
_FULL_S = 60.0
"""Seconds after which a process looks again whether `kept` has room."""


class NodeCache:
    """Writes and removes files, and keeps the cache below its bound."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self._budgets = {
            part: Budget(os.path.join(settings.folder, part)) for part in (KEPT, PASSING)
        }
        self._paused_until = self._full_until = 0.0
        self._has_warned = False

    @property
    def is_paused(self) -> bool:
        """Return whether writing is paused after a disk error."""
        return time.monotonic() < self._paused_until

    def path(self, part: str, name: str) -> str:
        """Return the path of a piece in one of the two folders."""
        return f"{self.settings.folder}/{part}/{name}"

    def write(self, name: str, data: bytes) -> None:
        """Write a piece. A disk error pauses the cache but does not end the run."""
        if self.is_paused:
            return
        suffix = f".{os.getpid()}.{threading.get_ident()}"
        part = PASSING if time.monotonic() < self._full_until else KEPT
        try:
            # before it is counted, so that a sweep finds every counted file
            _write(self.path(part, name) + suffix, data)
            if part == KEPT and not self._has_room(len(data)):
                _move(self.path(KEPT, name) + suffix, self.path(PASSING, name) + suffix)
                part = PASSING
            if part == PASSING:
                self._add(PASSING, len(data))
            _move(self.path(part, name) + suffix, self.path(part, name))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(self.path(part, name) + suffix)
            self.pause(error)

    def remove(self, name: str) -> None:
        """Remove a damaged piece."""
        for part, budget in self._budgets.items():
            with contextlib.suppress(OSError):
                size = os.stat(self.path(part, name)).st_size
                os.unlink(self.path(part, name))
                budget.add(-size)

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

    def _has_room(self, size: int) -> bool:
        """Count a file in `kept` if it fits there."""
        if self._add(KEPT, size):
            return True
        self._budgets[KEPT].add(-size)
        self._full_until = time.monotonic() + _FULL_S
        return False

    def _add(self, part: str, size: int) -> bool:
        """Count a file, and make room for it. Return whether the part is within its bound."""
        folder, most, budget = self.settings.folder, self.settings.part(part), self._budgets[part]
        if part == PASSING:  # another run may have kept more
            most = max(0, min(most, self.settings.bytes - self._budgets[KEPT].read()))
        if budget.add(size) <= most:
            return True
        with exclusive(os.path.join(folder, ".evict")):
            if (before := budget.add(0)) <= most:
                return True
            left = sweep(folder, part, int(most * _LEFT_SHARE) if part == PASSING else most)
            return budget.add(left - before) <= most  # bytes that others add meanwhile stay counted


class CacheSet:
    """The files of one split of one data set."""

    def __init__(self, cache: NodeCache, name: str) -> None:
        self.cache = cache
        self._name = name
        self._folder = cache.path(KEPT, name)
        try:
            for part in (KEPT, PASSING):
                os.makedirs(cache.path(part, f"{name}/{ENDS}"), mode=0o700, exist_ok=True)
        except OSError as error:
            cache.pause(error)

    def touch(self) -> None:
        """Mark the set as used now; unused sets are removed first."""
        with contextlib.suppress(OSError), open(os.path.join(self._folder, ".used"), "w"):
            pass

    def batch(self, number: int) -> str:
        """Return the name of a record batch."""
        return f"{self._name}/{number & 255:02x}/{number:x}"

    def end(self, shard: int) -> str:
        """Return the name of a shard's footer."""
        return f"{self._name}/{ENDS}/{shard:x}"

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a piece; None if it is missing or cannot be read."""
        kept = read_file(self.cache.path(KEPT, name))
        return read_file(self.cache.path(PASSING, name)) if kept is None else kept

    def has(self, name: str) -> bool:
        """Return whether a piece is in the cache."""
        return any(os.path.exists(self.cache.path(part, name)) for part in (KEPT, PASSING))

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


def _move(path: str, to: str) -> None:
    try:
        os.replace(path, to)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(to), mode=0o700, exist_ok=True)
        os.replace(path, to)


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
