"""A remote object as a file: what is read in order comes in requests that grow."""

import io
from typing import BinaryIO, Protocol, cast

import pyarrow as pa

from tokenfeed.pipeline.remote.objects import VersionedBytes

__all__ = ["LARGEST_BYTES", "Ranges", "SeekableFile", "open_ranged", "open_ranged_bytes"]

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
