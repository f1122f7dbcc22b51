"""How many bytes a cache holds, as all processes that share it count. Torch-free."""

import os
import struct

from tokenfeed.pipeline.caching.locks import alone

__all__ = ["Budget"]

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
