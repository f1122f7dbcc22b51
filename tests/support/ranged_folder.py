"""A folder that is read as a store is: by ranges, each request takes its time and is noted."""

import errno
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from tokenfeed.pipeline.errors import RemoteError
from tokenfeed.pipeline.remote.object_file import VersionedBytes
from tokenfeed.pipeline.remote.retrying import Traffic

__all__ = ["RangedFolder", "cached_files"]


@dataclass(frozen=True)
class RangedFolder:
    """Goes to other processes; all of them note their requests in one file. A file `broken` in the
    folder makes every request fail."""

    folder: Path
    log: Path
    """A line a request: the file, first byte and length."""
    delay_s: float = 0.0
    mine: list[str] = field(default_factory=list, compare=False)
    """The lines of this object."""

    @property
    def name(self) -> str:
        return f"ranged://{self.folder.name}"

    @property
    def traffic(self) -> Traffic:
        return Traffic(requests=len(self.mine), bytes=sum(int(m.split()[2]) for m in self.mine))

    def path(self, name: str) -> str:
        return f"{self.name}/{name}"

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def open(self, name: str, size: int) -> pa.NativeFile:
        return pa.BufferReader(self.read(name))

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def read_range(self, name: str, start: int, length: int) -> VersionedBytes:
        if (self.folder / "broken").exists():
            raise RemoteError(errno.ETIMEDOUT, "broken for a test", self.path(name))
        self._note(f"{name} {start} {length}\n")
        with open(self.folder / name, "rb") as file:
            file.seek(start)
            return VersionedBytes(file.read(length), "")

    def read_tail(self, name: str, length: int) -> VersionedBytes:
        return self.read_range(name, max(0, self.size(name) - length), length)

    def requests(self) -> list[str]:
        """Those of all processes so far."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def _note(self, line: str) -> None:
        self.mine.append(line)
        descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)
        time.sleep(self.delay_s)


def cached_files(folder: Path, *, footers: bool = False) -> list[Path]:
    """The files of a cache that hold record batches, or footers."""
    found = [path for path in folder.glob("v1/*/*/*") if "." not in path.name]
    return [path for path in found if (path.parent.name == "ends") == footers]
