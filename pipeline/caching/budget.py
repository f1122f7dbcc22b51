"""How many bytes a cache holds, as all processes that share it count. Torch-free."""

import os
import struct

from tokenfeed.pipeline.caching.locks import alone

__all__ = ["Budget"]

_FILE = ".bytes"
_SUM = struct.Struct("<q")


class Budget:
    """A sum in a small file. A process that is killed may leave it wrong; each sweep puts it right,
    for it has counted."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, _FILE)

    def read(self) -> int:
        """The sum now; 0 where the disk has no room for it."""
        try:
            return self.add(0)
        except OSError:
            return 0

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
    stored = os.pread(descriptor, _SUM.size, 0)
    return int(_SUM.unpack(stored)[0]) if len(stored) == _SUM.size else 0
