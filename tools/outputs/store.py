"""An object store as the place where a data set is made.

A shard is written in a temporary folder of this machine and sent whole, by one request that carries
its checksum: so nobody need read it again to know that it is as it was left.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import FileInfo
from tokenfeed.pipeline.format.storage import file_xxh3
from tokenfeed.pipeline.format.store import open_store
from tokenfeed.pipeline.remote.address import public
from tokenfeed.pipeline.remote.object_store import XXH3_KEY, ObjectStore
from tokenfeed.pipeline.remote.objects import ObjectInfo
from tokenfeed.tools.at_once import results_of

__all__ = ["StoreOutput"]

_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class StoreOutput:
    """Objects below an address."""

    store: ObjectStore

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The place at an address; nothing is asked yet.

        Raises:
            ConfigError: There is no such store, or no data set is written there.
        """
        store = open_store(url)
        if isinstance(store, ObjectStore) and not store.address.traits.is_web:
            return cls(store)
        raise ConfigError(
            f"{public(url)}: no data set is written there. Give a folder, or the address of "
            "a bucket."
        )

    def __str__(self) -> str:
        return self.store.name

    @property
    def place(self) -> ObjectStore:
        """See `Output`."""
        return self.store

    def absolute(self) -> Self:
        """See `Output`."""
        return self

    def path(self, name: str) -> str:
        """See `Output`."""
        return self.store.path(name)

    def prepare(self) -> list[Path]:
        """See `Output`: there is nothing to make."""
        return []

    def names(self, folder: str = "") -> set[str]:
        """See `Output`; a request for each thousand objects below."""
        below = f"{folder}/" if folder else ""
        found = (info.name.removeprefix(below) for info in self.store.list(folder))
        return {name.partition("/")[0] for name in found}

    def read(self, name: str) -> bytes:
        """See `Output`."""
        return self.store.read(name)

    def size(self, name: str) -> int | None:
        """See `Output`."""
        info = self._head(name)
        return info.size if info else None

    def written_at(self, name: str) -> int | None:
        """See `Output`: `has` asks for the checksum that the object was written with."""
        return None

    def has(self, info: FileInfo, written_at: int | None = None) -> bool:
        """See `Output`; compares the checksum that the object was written with."""
        there = self._head(info.file)
        return there is not None and _known(there) == (info.bytes, info.xxh3)

    def write(self, name: str, content: bytes) -> None:
        """See `Output`."""
        self.store.write(name, content, {XXH3_KEY: xxhash.xxh3_64_hexdigest(content)})

    def create(self, name: str, content: bytes) -> bool:
        """See `Output`."""
        return self.store.create(name, content)

    def delete(self, *names: str) -> None:
        """See `Output`."""
        for _ in results_of(self.store.delete, names, _AT_ONCE):
            pass

    def prune(self, *folders: str) -> None:
        """See `Output`: a store has no folders."""

    @contextlib.contextmanager
    def room(self) -> Iterator[Path]:
        """See `Output`."""
        with tempfile.TemporaryDirectory(prefix="tokenfeed-") as folder:
            yield Path(folder)
            for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                name = path.relative_to(folder).as_posix()
                self.store.write(name, path, {XXH3_KEY: file_xxh3(path)})

    def _head(self, name: str) -> ObjectInfo | None:
        try:
            return self.store.head(name)
        except FileNotFoundError:
            return None


def _known(info: ObjectInfo) -> tuple[int, str | None]:
    return info.size, info.metadata.get(XXH3_KEY)
