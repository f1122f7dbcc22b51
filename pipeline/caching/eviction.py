"""The size of the cache, and which files leave it when it is full. Torch-free."""

import contextlib
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tokenfeed.pipeline.caching.locks import alone
from tokenfeed.pipeline.planning.ahead import NEVER

__all__ = ["ENDS", "FIRST_END", "Budget", "Until", "sweep"]

_FILE = ".bytes"
_SUM = struct.Struct("<q")
_UNKNOWN = 1 << 60
"""Above any bound: the first file that is added to such a cache has it swept, and so counted."""


class Budget:
    """A sum in a small file. A process that is killed may leave it wrong; each sweep puts it right,
    for it has counted."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, _FILE)

    def read(self) -> int:
        """The sum now; 0 where nothing says it."""
        try:
            total = self.add(0)
        except OSError:
            return 0
        return total if total < _UNKNOWN else 0

    def add(self, count: int) -> int:
        """Change the sum; gives the new one."""
        with alone(self._path) as descriptor:
            total = _read(descriptor) + count
            if count:
                os.pwrite(descriptor, _SUM.pack(total), 0)
            return total

    def correct(self, before: int, counted: int) -> None:
        """Replace what the sum was before a count by what was counted: what was added meanwhile
        stays."""
        self.add(counted - before)


def _read(descriptor: int) -> int:
    """The sum; that of a new file is not known, nor one that can be none."""
    stored = os.pread(descriptor, _SUM.size, 0)
    total = int(_SUM.unpack(stored)[0]) if len(stored) == _SUM.size else _UNKNOWN
    return total if 0 <= total <= 2 * _UNKNOWN else _UNKNOWN


Until = Callable[[np.ndarray], np.ndarray]
"""How many windows it is until pieces are read, by their numbers; shape (K,) each."""
FIRST_END = 1 << 48
"""The number of the first footer of a set, behind all record batches."""

ENDS = "ends"
"""The folder of a set that has its footers."""

_NUMBER = re.compile("0|[1-9a-f][0-9a-f]{,11}")
_KEPT_SHARE = 0.9
"""Of the bound, so that not every file has to make room for itself."""
_STALE_S = 600.0
"""A temporary file of that age is nobody's."""
_UNUSED_S = 3600.0
"""A set that nobody has read for so long goes first."""
_GONE = 1 << 50
"""Until of a set that nobody reads."""


def sweep(folder: str, bound: int, until: dict[str, Until]) -> int:
    """Remove files until 90 % of the bound are left; gives the bytes that are.

    Args:
        folder: Of the cache.
        bound: In bytes.
        until: Of each own set by its name.
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
    """Until of every piece, set by set, shape (K,).

    Nobody here knows the plan of another run: what it reads is spread over the time of this one, so
    that both lose their share.
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
    """A file of a set: a record batch, or a footer."""

    path: str
    number: int
    size: int


def _files(folder: str) -> tuple[int, list[_Piece]]:
    """Bytes of what is being written in a set's folder, and all that is whole; what has a name
    that no cache gives is somebody else's."""
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
    """Whether a file is a record batch or a footer by its name, and lies where it belongs."""
    return bool(_NUMBER.fullmatch(name)) and folder in (ENDS, f"{int(name, 16) & 255:02x}")


def _size(entry: "os.DirEntry[str]") -> int:
    """Bytes of a file; 0 for one that a process began and never finished, which goes."""
    found = entry.stat()
    if "." in entry.name and time.time() - found.st_mtime > _STALE_S:
        os.unlink(entry.path)
        return 0
    return found.st_size
