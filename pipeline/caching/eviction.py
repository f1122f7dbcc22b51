"""The size of the cache, and which files are removed when it is full. Torch-free.

`sweep` removes the files that the plan reads last. For example, the plan reads record batch 7 in 2
windows, batch 9 in 40 windows, and batch 12 in no window of this epoch or the next: batch 12 goes
first, then batch 9.
"""

import contextlib
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tokenfeed.pipeline.format.storage import exclusive
from tokenfeed.pipeline.planning.plan import NEVER

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

    def correct(self, before: int, counted: int) -> None:
        """Replace the size `before` a count by the size `counted`. Bytes that other processes added
        meanwhile stay included."""
        self.add(counted - before)


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
