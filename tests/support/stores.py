"""A store of another kind than a folder, and how it is registered."""

import errno
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from support.data_sets import files_of
from support.object_server import Remote
from tokenfeed.pipeline.caching.node_cache import CacheSettings
from tokenfeed.pipeline.errors import RemoteError
from tokenfeed.pipeline.format import store
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.remote.object_file import VersionedBytes
from tokenfeed.pipeline.remote.retrying import Traffic
from tokenfeed.pipeline.windows.reader import WindowReader


@dataclass(frozen=True)
class MemoryStore:
    """The files of a data set as bytes."""

    name: str
    files: dict[str, bytes] = field(compare=False)

    def path(self, name: str) -> str:
        return f"{self.name}/{name}"

    def size(self, name: str) -> int:
        return len(self.read(name))

    def open(self, name: str, size: int) -> pa.NativeFile:
        return pa.BufferReader(self.read(name))

    def read(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(2, "No such file", self.path(name))
        return self.files[name]


def keep_in_memory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, bytes]:
    """The files of `folder`, which paths like `memory://data` name from now on."""
    files = files_of(folder)
    monkeypatch.setitem(store.STORES, "memory", lambda path: MemoryStore(path, files))
    return files


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
    found = [path for path in folder.glob("v2/*/*/*/*") if "." not in path.name]
    return [path for path in found if (path.parent.name == "ends") == footers]


def cached_reader(remote: Remote, cache: Path | None) -> WindowReader:
    """A reader of the split `train` in a bucket, through a cache in a folder unless it is None."""
    settings = None
    if cache:
        (cache / "v2").mkdir(parents=True, exist_ok=True)
        settings = CacheSettings(str(cache / "v2"), 1 << 30, is_whole=False, windows_ahead=1)
    return WindowReader(open_splits([remote.store], "train"), cache=settings)
