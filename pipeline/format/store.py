"""Stores and places: where files are read, and where they are written.

`open_store` and `open_place` make one from the path that a user gives. A folder is a `LocalStore`.
A path with a scheme, like `s3://bucket/data`, is opened by the entry of `STORES` for that scheme.
The stores in `remote` are imported when the first such path is opened.

Inside `reading_once`, a repeated read of a small file returns the first result. A run reads the
manifest of its data set many times: for defaults, task, loaders and evaluations. A read from a
store starts a program for 0.2 s, and decoding 100,000 shards takes another second. The memo also
keeps one version of the file for the whole run. Commands that copy do not use it, so they
always read the current file. Torch-free.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import pyarrow as pa

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.storage import (
    TEMPORARY_SUFFIX,
    atomic_file,
    atomic_write,
    check_regular,
    file_xxh3,
    open_regular,
)
from tokenfeed.pipeline.remote.address import SCHEMES
from tokenfeed.pipeline.remote.object_file import FileFacts, Ranges, VersionedBytes
from tokenfeed.pipeline.remote.retrying import Traffic
from tokenfeed.pipeline.text import is_address, public

logger = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 16
"""A file of at most this size is read at once. A loader keeps many of them open."""
_COPIED_BYTES = 1 << 20


@runtime_checkable
class Store(Protocol):
    """The files of one data set, by their names below its root, with forward slashes.

    A store can be pickled and sent to worker processes. Failures raise an OSError with an errno, so
    that the message for a missing file, a missing right or a broken disk is the same in all stores.
    """

    @property
    def name(self) -> str:
        """The data set as messages show it."""
        ...

    def path(self, name: str) -> str:
        """Return a file as messages show it."""
        ...

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        ...

    def open(self, name: str, size: int) -> pa.NativeFile:
        """Open a file of a known size, to read any part of it."""
        ...

    def read(self, name: str) -> bytes:
        """Return the whole of a small file."""
        ...


@runtime_checkable
class RangedStore(Store, Ranges, Protocol):
    """A store in which a request costs more than the bytes that it returns.

    Loaders read its shards by record batches, one request each, and keep them in the node's cache.
    Any thread may use it. It repeats requests that fail, and raises in the end.
    """

    @property
    def traffic(self) -> Traffic:
        """Counts of this process's requests."""
        ...

    def read_tail(self, name: str, length: int) -> VersionedBytes:
        """Return the last `length` bytes of a file, or all of a shorter file.

        Errors are those of `read_range`.
        """
        ...


@runtime_checkable
class FetchingStore(RangedStore, Protocol):
    """A store that downloads whole files to this machine and keeps them, so no cache needs to."""

    def fetch(self, name: str) -> None:
        """Download a file unless it is here; errors are those of `read_range`."""
        ...


@runtime_checkable
class Place(Store, Protocol):
    """A store that can be written: a folder, or the objects below an address.

    Every file is written whole or not at all. `str` returns the name.
    """

    @property
    def is_writable(self) -> bool:
        """Whether files can be written there."""
        ...

    def absolute(self) -> Self:
        """Return the same place for a process with another working directory."""
        ...

    def prepare(self) -> None:
        """Make the folder if it is missing.

        Raises:
            ConfigError: The folder cannot be made.
        """
        ...

    def names(self, folder: str = "") -> set[str]:
        """Return the names of files and folders in the place, or in a folder of it."""
        ...

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""
        ...

    def written_at(self, name: str) -> int | None:
        """Return when a file was written, in ns; None if missing or if `has` ignores it."""
        ...

    def has(self, info: FileFacts, written_at: int | None = None) -> bool:
        """Return whether a file has the content that `info` describes.

        A file in a folder is read, unless its size and `written_at` are unchanged. An object is
        known by its size and the checksum that it was written with.
        """
        ...

    def write(self, name: str, data: bytes | Path) -> object:
        """Write a file, from memory or from a file of this machine. It replaces an earlier file."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless it exists. Return whether this call wrote it."""
        ...

    def delete(self, *names: str) -> None:
        """Delete files; missing files are ignored."""
        ...

    def prune(self, *folders: str) -> None:
        """Delete folders that are empty; `""` is the place itself."""
        ...

    def room(self) -> AbstractContextManager[Path]:
        """Yield a folder of this machine to write files in.

        When the block ends without an error, these files are in the place.
        """
        ...


StorePath = str | PathLike[str] | Store
"""A data set: a folder, a path with a scheme, or a store."""


@dataclass(frozen=True, slots=True)
class LocalStore:
    """A folder of this machine, or a folder that several machines share.

    Several processes may write a file at the same time: each uses its own temporary name.
    """

    folder: Path
    """The folder as the user gave it; messages show it."""
    root: str = field(init=False)
    """Absolute path of the folder, which stays right when the working directory changes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", str(self.folder.absolute()))

    @classmethod
    def from_path(cls, path: str | PathLike[str]) -> Self:
        """Return the store in a folder, which may not exist yet."""
        return cls(Path(path))

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """The folder as the user gave it."""
        return str(self.folder)

    @property
    def is_writable(self) -> bool:
        """Always true."""
        return True

    def path(self, name: str) -> str:
        """Return a file as messages show it."""
        return str(self.folder / name)

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        return os.stat(os.path.join(self.root, name)).st_size

    def open(self, name: str, size: int) -> pa.NativeFile:
        """Open a file with any name that the system allows; a small file is read into memory.

        Arrow reads a footer in its own threads. From memory this costs no change of threads.
        """
        path = os.path.join(self.root, name)
        if size <= _SMALL_BYTES:
            return pa.BufferReader(self.read(name))
        check_regular(path, os.stat(path))
        return pa.OSFile(os.fsencode(path))

    def read(self, name: str) -> bytes:
        """Return the whole of a small file."""
        with open_regular(os.path.join(self.root, name)) as file:
            return file.read()

    def absolute(self) -> Self:
        """See `Place`."""
        return type(self)(Path(self.root))

    def prepare(self) -> None:
        """See `Place`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self}: cannot be made ({error.strerror}). Give a folder elsewhere."
            ) from error

    def names(self, folder: str = "") -> set[str]:
        """See `Place`."""
        try:
            return set(os.listdir(self.folder / folder))
        except FileNotFoundError:
            return set()

    def exists(self, name: str) -> bool:
        """See `Place`."""
        return (self.folder / name).is_file()

    def written_at(self, name: str) -> int | None:
        """See `Place`."""
        try:
            return (self.folder / name).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def has(self, info: FileFacts, written_at: int | None = None) -> bool:
        """See `Place`."""
        path = self.folder / info.file
        if not path.is_file() or path.stat().st_size != info.bytes:
            return False
        if written_at is not None and written_at == self.written_at(info.file):
            return True
        return file_xxh3(path) == info.xxh3

    def write(self, name: str, data: bytes | Path) -> None:
        """See `Place`."""
        with atomic_file(self.folder / name, is_shared=True) as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                with data.open("rb") as source:
                    shutil.copyfileobj(source, file, _COPIED_BYTES)

    def create(self, name: str, data: bytes) -> bool:
        """See `Place`.

        On a file system without hard links, the last of several simultaneous calls wins.
        """
        path = self.folder / name
        own = path.with_name(f"{path.name}.{os.urandom(8).hex()}{TEMPORARY_SUFFIX}")
        try:
            atomic_write(own, data)
        except OSError as error:
            error.filename = str(path)
            raise
        is_created = True
        try:
            os.link(own, path)
        except FileExistsError:
            is_created = False
        except OSError:  # no hard links
            is_created = not path.exists()
            if is_created:
                os.replace(own, path)
        own.unlink(missing_ok=True)
        return is_created

    def delete(self, *names: str) -> None:
        """See `Place`. A folder with such a name is left there, with a warning."""
        for name in names:
            path = self.folder / name
            try:
                path.unlink(missing_ok=True)
            except OSError:
                if not path.is_dir():
                    raise
                logger.warning("%s: left there, it is a folder", path)

    def prune(self, *folders: str) -> None:
        """See `Place`."""
        for folder in folders:
            with contextlib.suppress(OSError):
                (self.folder / folder).rmdir()

    @contextlib.contextmanager
    def room(self) -> Iterator[Path]:
        """See `Place`: yields the folder itself, so files are written in their final place."""
        yield self.folder


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
"""How a path is opened, by its scheme."""


def open_store(path: StorePath) -> Store:
    """Return the store that a path names. Sends no request.

    Raises:
        ConfigError: The path is empty, or its scheme is unknown.
    """
    if path == "":  # a Path of it would be the folder of the process
        raise ConfigError("the path of a folder is empty. Give a folder, or a URL.")
    if isinstance(path, str) and "://" in path:
        scheme = path.partition("://")[0]
        if scheme not in STORES:
            known = ", ".join(f"{name}://" for name in STORES) or "none"
            raise ConfigError(
                f"{public(path)}: no store for `{scheme}://` (known: {known}). Give one of "
                "these, or a folder of this machine."
            )
        return STORES[scheme](path)
    if isinstance(path, str | os.PathLike):
        return LocalStore.from_path(local_path(os.fspath(path)))
    return path


def local_path(path: str) -> Path:
    """Return the path on this machine that a text names.

    Raises:
        ConfigError: The text is an address. With one slash, it would name a local folder.
    """
    if is_address(path):
        raise ConfigError(
            f"{public(path)}: is not a path on this machine. Write an address as a text with "
            "`://`, and a folder of this name with `./` in front."
        )
    return Path(path)


def open_place(path: str) -> Place:
    """Return the place that a path names: a folder, or the address of a store. Sends no request.

    Raises:
        ConfigError: The scheme is unknown, the store is read-only, or the path looks like a typo.
    """
    if not path:
        raise ConfigError("the output has no name. Give a folder, or the address of a bucket.")
    # Without slashes, an address of the Hub would name a local folder.
    store = None if path.startswith(("hf:", "hub:")) else open_store(path)
    if isinstance(store, Place) and store.is_writable:
        return store
    raise ConfigError(
        f"{public(path)}: nothing can be written there. Give a folder, or the address of a bucket."
    )


T = TypeVar("T")
_kept: ContextVar[dict[str, Any] | None] = ContextVar("kept", default=None)


@contextmanager
def reading_once() -> Iterator[None]:
    """Keep what this thread reads until the end of the outermost block."""
    if _kept.get() is not None:
        yield
        return
    before = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(before)


def once(path: str, read: Callable[[], T]) -> T:
    """Return the result of `read`, or the kept result for the same path. Errors are not kept."""
    kept = _kept.get()
    if kept is None:
        return read()
    if path not in kept:
        kept[path] = read()
    found: T = kept[path]
    return found
