"""A store in memory that does what a test says: fails, loses answers, cuts files off, waits."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import pyarrow as pa
import pytest

from tokenfeed.pipeline.format.store import STORES

__all__ = ["URL", "FaultyStore", "faulty_store"]

URL = "faulty://bucket/run"


class FaultyStore:
    """A `Place`. Before each operation, and after a write, it calls `before`, which may raise."""

    store: ClassVar[dict[str, bytes]] = {}
    """Content of each object by its whole path."""
    before: ClassVar[Callable[[str, str], None]] = staticmethod(lambda operation, path: None)
    kept_share: ClassVar[float] = 1.0
    """Less than 1: writes lose their ends without an error."""
    is_writable = True

    def __init__(self, url: str) -> None:
        self.name = url

    def path(self, name: str) -> str:
        return f"{self.name}/{name}"

    def absolute(self) -> Self:
        return self

    def prepare(self) -> list[Path]:
        return []

    def size(self, name: str) -> int:
        return len(self._find(name))

    def exists(self, name: str) -> bool:
        return self.path(name) in self.store

    def written_at(self, name: str) -> int | None:
        return None

    def has(self, info: Any, written_at: int | None = None) -> bool:
        raise NotImplementedError

    def names(self, folder: str = "") -> set[str]:
        self._ask("find", folder)
        below = self.path(f"{folder}/" if folder else "")
        return {
            path.removeprefix(below).partition("/")[0]
            for path in self.store
            if path.startswith(below)
        }

    def read(self, name: str) -> bytes:
        self._ask("cat", name)
        return self._find(name)

    def open(self, name: str, size: int) -> pa.NativeFile:
        self._ask("get", name)
        return pa.BufferReader(self._find(name))

    def write(self, name: str, data: bytes | Path) -> None:
        operation = "pipe" if isinstance(data, bytes) else "put"
        content = data if isinstance(data, bytes) else data.read_bytes()
        self._ask(operation, name)
        self.store[self.path(name)] = content[: round(len(content) * self.kept_share)]
        self._ask(f"{operation} answer", name)

    def create(self, name: str, data: bytes) -> bool:
        raise NotImplementedError

    def delete(self, *names: str) -> None:
        for name in names:
            self._ask("rm", name)
            self.store.pop(self.path(name), None)

    def prune(self, *folders: str) -> None:
        pass

    def room(self) -> contextlib.AbstractContextManager[Path]:
        raise NotImplementedError

    def _find(self, name: str) -> bytes:
        try:
            return self.store[self.path(name)]
        except KeyError:
            raise FileNotFoundError(self.path(name)) from None

    def _ask(self, operation: str, name: str) -> None:
        type(self).before(operation, self.path(name))


@contextmanager
def faulty_store() -> Iterator[type[FaultyStore]]:
    """The store, empty and without faults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STORES, "faulty", FaultyStore)
        FaultyStore.store.clear()
        yield FaultyStore
        for thread in threading.enumerate():
            if thread.name == "upload":  # it would write into the store of the next test
                thread.join(60)
    FaultyStore.before = staticmethod(lambda operation, path: None)
    FaultyStore.kept_share = 1.0
