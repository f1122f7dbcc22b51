"""A store of fsspec that does what a test says: fails, writes halves, waits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

__all__ = ["URL", "FaultyStore", "faulty_store"]

URL = "faulty://bucket/run"


class FaultyStore(MemoryFileSystem):
    """Before each operation it asks `before`, which may raise or wait; a write that is refused has
    written a half."""

    protocol = "faulty"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    before: ClassVar[Callable[[str, str], None]] = staticmethod(lambda operation, path: None)
    kept_share: ClassVar[float] = 1.0
    """Less than 1: writes lose their ends, and say nothing."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(path.replace("faulty://", "memory://"))

    def put_file(self, lpath: str, rpath: str, *args: Any, **more: Any) -> None:
        self._write("put", rpath, Path(lpath).read_bytes())

    def pipe_file(self, path: str, value: bytes, *args: Any, **more: Any) -> None:
        self._write("pipe", path, value)

    def mv(self, path1: str, path2: str, *args: Any, **more: Any) -> None:
        self._ask("mv", path2)
        self.cp_file(path1, path2)
        self._ask("mv half", path2)
        super().rm_file(path1)

    def rm_file(self, path: str) -> None:
        self._ask("rm", path)
        super().rm_file(path)

    def cat_file(self, path: str, *args: Any, **more: Any) -> bytes:
        self._ask("cat", path)
        data: bytes = super().cat_file(path)
        return data

    def get_file(self, rpath: str, lpath: str, *args: Any, **more: Any) -> None:
        self._ask("get", rpath)
        Path(lpath).write_bytes(super().cat_file(rpath))

    def find(self, path: str, *args: Any, **more: Any) -> Any:
        self._ask("find", path)
        return super().find(path, *args, **more)

    def _ask(self, operation: str, path: str) -> None:
        type(self).before(operation, self._strip_protocol(path))

    def _write(self, operation: str, path: str, data: bytes) -> None:
        try:
            self._ask(operation, path)
        except Exception:
            super().pipe_file(path, data[: len(data) // 2])
            raise
        super().pipe_file(path, data[: round(len(data) * self.kept_share)])


@contextmanager
def faulty_store() -> Iterator[type[FaultyStore]]:
    """The store, empty and without faults."""
    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    FaultyStore.store.clear()
    FaultyStore.pseudo_dirs[:] = [""]
    yield FaultyStore
    FaultyStore.before = staticmethod(lambda operation, path: None)
    FaultyStore.kept_share = 1.0
