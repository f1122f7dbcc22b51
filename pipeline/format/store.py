"""Where the files of a data set are: one small protocol, by which everything that reads opens them.

A store is made from the path that a user gives. A folder is a `LocalStore`; a path with a scheme,
like `s3://bucket/data`, is for the store that has registered the scheme: those of the room `remote`
are imported when the first path asks for one. Torch-free.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Protocol, runtime_checkable

import pyarrow as pa

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.remote.address import public
from tokenfeed.pipeline.remote.objects import VersionedBytes
from tokenfeed.pipeline.remote.ranged import Ranges
from tokenfeed.pipeline.remote.schemes import SCHEMES

__all__ = [
    "STORES",
    "FetchingStore",
    "LocalStore",
    "RangedStore",
    "Store",
    "StorePath",
    "open_store",
]

_SMALL_BYTES = 1 << 16
"""A file of no more is read at once; a loader keeps many of them."""


@runtime_checkable
class Store(Protocol):
    """The files of one data set, by their names below its root, with forward slashes.

    It goes to worker processes as a pickle. What fails raises an OSError with an errno, so that
    the message for a missing file, a missing right or a broken disk is the same for every store.
    """

    @property
    def name(self) -> str:
        """The data set as a message names it."""
        ...

    def path(self, name: str) -> str:
        """A file as a message names it."""
        ...

    def size(self, name: str) -> int:
        """Bytes of the file."""
        ...

    def open(self, name: str, size: int) -> pa.NativeFile:
        """Open a file of a known size, to read any part of it."""
        ...

    def read(self, name: str) -> bytes:
        """The whole of a small file."""
        ...


@runtime_checkable
class RangedStore(Store, Ranges, Protocol):
    """A store in which a request costs more than the bytes it brings: loaders read its shards by
    record batches, each in one request, and keep them in the cache of the node.

    Safe to share between threads. It repeats a request that fails, and raises in the end.
    """

    def read_tail(self, name: str, length: int) -> VersionedBytes:
        """The last `length` bytes of a file, or all where it has fewer; errors are those of
        `read_range`."""
        ...


@runtime_checkable
class FetchingStore(RangedStore, Protocol):
    """One that brings files to this machine whole, and keeps them: no cache does so again."""

    def fetch(self, name: str) -> None:
        """Bring a file, unless it is there; errors are those of `read_range`."""
        ...


StorePath = str | PathLike[str] | Store
"""What names a data set: a folder, a path with a scheme, or a store."""


@dataclass(frozen=True, slots=True)
class LocalStore:
    """A folder of this machine."""

    folder: Path
    """As it was given, for messages."""
    root: str
    """The same place whatever the working directory becomes."""

    @classmethod
    def from_path(cls, path: str | PathLike[str]) -> "LocalStore":
        """The store in a folder, which need not be there yet."""
        return cls(Path(path), str(Path(path).absolute()))

    @property
    def name(self) -> str:
        """The folder as it was given."""
        return str(self.folder)

    def path(self, name: str) -> str:
        """A file as a message names it."""
        return str(self.folder / name)

    def size(self, name: str) -> int:
        """Bytes of the file."""
        return os.stat(os.path.join(self.root, name)).st_size

    def open(self, name: str, size: int) -> pa.NativeFile:
        """Open a file of any name the system allows; a small one comes from memory.

        Arrow reads a footer in threads of its own: in memory that costs no change of threads.
        """
        if size <= _SMALL_BYTES:
            return pa.BufferReader(self.read(name))
        return pa.OSFile(os.fsencode(os.path.join(self.root, name)))

    def read(self, name: str) -> bytes:
        """The whole of a small file."""
        with open(os.path.join(self.root, name), "rb") as file:
            return file.read()


def _object_store(url: str) -> Store:
    from tokenfeed.pipeline.remote.object_store import ObjectStore

    return ObjectStore.from_url(url)


def _hub_store(url: str) -> Store:
    from tokenfeed.pipeline.remote.hub import HubStore

    return HubStore.from_url(url)


STORES: dict[str, Callable[[str], Store]] = {
    **dict.fromkeys(SCHEMES, _object_store),
    "hf": _hub_store,
}
"""By the scheme of a path, what makes a store of the path."""


def open_store(path: StorePath) -> Store:
    """The store that a path names; nothing is read yet.

    Raises:
        ConfigError: Nobody has registered the path's scheme.
    """
    if isinstance(path, str) and "://" in path:
        scheme = path.partition("://")[0]
        if scheme not in STORES:
            known = ", ".join(f"{name}://" for name in STORES) or "none"
            raise ConfigError(
                f"{public(path)}: no store for `{scheme}://` (known: {known}). Give one of "
                "these, or a folder of this machine."
            )
        return STORES[scheme](path)
    return path if isinstance(path, Store) else LocalStore.from_path(path)
