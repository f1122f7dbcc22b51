"""A store of another kind than a folder, and how it is registered."""

from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
from command import files_of

from tokenfeed.pipeline.format import store

__all__ = ["MemoryStore", "keep_in_memory"]


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
