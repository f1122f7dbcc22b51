"""A remote object as a file: what is read in order comes in requests that grow."""

import io
from typing import BinaryIO, Protocol, cast

import pyarrow as pa

from tokenfeed.pipeline.remote.objects import Part

__all__ = ["open_ranged", "open_ranged_bytes"]

_WHOLE_BYTES = 1 << 20
_FIRST_BYTES, _LARGEST_BYTES = 1 << 18, 8 << 20


class _Ranges(Protocol):
    """What gives any part of an object."""

    def read_range(self, name: str, start: int, length: int) -> Part:
        """`length` bytes from `start` on."""
        ...


def open_ranged(store: _Ranges, name: str, size: int) -> pa.NativeFile:
    """Open an object; a small one comes whole."""
    if size <= _WHOLE_BYTES:
        return pa.BufferReader(store.read_range(name, 0, size).data)
    return pa.PythonFile(_RangedFile(store, name, size), mode="r")


def open_ranged_bytes(store: _Ranges, name: str, size: int) -> BinaryIO:
    """The same for who reads bytes."""
    return cast(BinaryIO, _RangedFile(store, name, size))


class _RangedFile(io.RawIOBase):
    """Keeps the range it read last; where the next one follows it, that is twice as long."""

    def __init__(self, store: _Ranges, name: str, size: int) -> None:
        self._store, self._name, self._size = store, name, size
        self._at = 0
        self._kept, self._kept_from = b"", 0
        self._next_bytes = _FIRST_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        left = max(self._size - self._at, 0)
        size = left if size < 0 else min(size, left)
        if not size:
            return b""
        if not self._has(size):
            self._fetch(size)
        begin = self._at - self._kept_from
        self._at += size
        return self._kept[begin : begin + size]

    def _has(self, size: int) -> bool:
        end = self._kept_from + len(self._kept)
        return self._kept_from <= self._at and self._at + size <= end

    def _fetch(self, size: int) -> None:
        """Read from here on; a beginning that is kept is not read again."""
        begin, end = self._at, self._kept_from + len(self._kept)
        follows = self._kept_from <= begin <= end
        head = self._kept[begin - self._kept_from :] if follows else b""
        self._next_bytes = min(2 * self._next_bytes, _LARGEST_BYTES) if follows else _FIRST_BYTES
        begin += len(head)
        length = min(max(size - len(head), self._next_bytes), self._size - begin)
        self._kept = head + self._store.read_range(self._name, begin, length).data
        self._kept_from = self._at
