"""Objects of a store: what the store returns about them, and reading them as files.

A file that is read in order sends requests that grow.
"""

import errno
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import pyarrow as pa

from tokenfeed.pipeline.errors import RemoteError

__all__ = [
    "LARGEST_BYTES",
    "FileFacts",
    "ObjectInfo",
    "Ranges",
    "SeekableFile",
    "VersionedBytes",
    "cut_short",
    "open_ranged",
    "open_ranged_bytes",
    "version_of",
]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object."""

    name: str
    size: int
    etag: str
    """Differs for another version; empty where a server tells none, and in a list of Google's."""
    version: str
    """As `VersionedBytes` has it; of a list, its times may be finer."""
    modified_s: float = 0.0
    """When it was written, by the store's clock."""
    metadata: dict[str, str] = field(default_factory=dict)
    """What was given when it was written; of a list always empty."""


class FileFacts(Protocol):
    """What a manifest says about a file."""

    @property
    def file(self) -> str:
        """Its name below the data set."""
        ...

    @property
    def bytes(self) -> int:
        """Its size."""
        ...

    @property
    def xxh3(self) -> str:
        """The xxh3-64 of its content, 16 hex digits."""
        ...


class VersionedBytes(NamedTuple):
    """Some bytes of an object."""

    data: bytes
    version: str
    """Of the object: what has another content has another one, but equal contents may differ here,
    as replicas do; empty where nothing is told."""


def version_of(meta: Mapping[str, Any]) -> str:
    """The version of an object by what came with its bytes: the ETag, or time and size."""
    etag: str = (meta["e_tag"] or "").removeprefix("W/")
    return etag or f"{meta['last_modified'].timestamp()} {meta['size']}"


def cut_short(place: str, end: int, size: int) -> RemoteError:
    """What to raise where bytes up to `end` were asked for, and there are `size` in all."""
    return RemoteError(
        errno.EINVAL,
        f"expected bytes up to {end:,}, got {size:,} in all: it was cut short or replaced. Copy it "
        "again",
        place,
    )


_WHOLE_BYTES = 1 << 20
_FIRST_BYTES, LARGEST_BYTES = 1 << 18, 8 << 20


class Ranges(Protocol):
    """What gives any part of an object."""

    def read_range(self, name: str, start: int, length: int) -> VersionedBytes:
        """Some bytes of an object, by one request, and which version of it they are of.

        Args:
            name: The object.
            start: The place of the first byte, counted from 0.
            length: How many bytes; none are given without a request.

        Returns:
            As many as were asked for, never fewer.

        Raises:
            FileNotFoundError: There is no such object.
            OSError: It has fewer bytes, or the store refuses or cannot be reached.
        """
        ...


def open_ranged(store: Ranges, name: str, size: int) -> pa.NativeFile:
    """Open an object; a small one comes whole."""
    if size <= _WHOLE_BYTES:
        return pa.BufferReader(store.read_range(name, 0, size).data)
    return pa.PythonFile(_RangedFile(store, name, size), mode="r")


def open_ranged_bytes(store: Ranges, name: str, size: int) -> BinaryIO:
    """The same for who reads bytes."""
    return cast(BinaryIO, _RangedFile(store, name, size))


class SeekableFile(io.RawIOBase):
    """A file of known size that can be read anywhere; `_bytes` gives what is there."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Have the next read begin elsewhere; nothing is asked."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """As many bytes as there are, at most `size`."""
        left = max(self._size - self._at, 0)
        size = left if size < 0 else min(size, left)
        if not size:
            return b""
        self._at += size
        return self._bytes(self._at - size, size)

    def _bytes(self, at: int, size: int) -> bytes:
        """`size` bytes from `at` on; the file has them."""
        raise NotImplementedError


class _RangedFile(SeekableFile):
    """Keeps the range it read last; where the next one follows it, that is twice as long."""

    def __init__(self, store: Ranges, name: str, size: int) -> None:
        super().__init__(size)
        self._store, self._name = store, name
        self._kept, self._kept_from = b"", 0
        self._next_bytes = _FIRST_BYTES

    def _bytes(self, at: int, size: int) -> bytes:
        if not self._has(at, size):
            self._fetch(at, size)
        begin = at - self._kept_from
        return self._kept[begin : begin + size]

    def _has(self, at: int, size: int) -> bool:
        return self._kept_from <= at and at + size <= self._kept_from + len(self._kept)

    def _fetch(self, at: int, size: int) -> None:
        """Read from there on; a beginning that is kept is not read again."""
        begin, end = at, self._kept_from + len(self._kept)
        follows = self._kept_from <= begin <= end
        head = self._kept[begin - self._kept_from :] if follows else b""
        self._next_bytes = min(2 * self._next_bytes, LARGEST_BYTES) if follows else _FIRST_BYTES
        begin += len(head)
        length = min(max(size - len(head), self._next_bytes), self._size - begin)
        self._kept = head + self._store.read_range(self._name, begin, length).data
        self._kept_from = at
