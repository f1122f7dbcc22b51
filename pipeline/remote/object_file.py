"""Objects of a store: what the store returns about them, and reading them as files.

Requests grow while a file is read in order. A `SpansFile` is read only in some spans, such as the
columns of a table, side by side. It skips the bytes between the spans.
"""

import errno
import io
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import pyarrow as pa

from tokenfeed.pipeline.errors import RemoteError


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store returns about an object."""

    name: str
    size: int
    etag: str
    """Changes with the content. Empty if the server sends none, and in lists of Google's store."""
    version: str
    """See `VersionedBytes`. In lists, times may be more precise."""
    modified_s: float = 0.0
    """When it was written, by the clock of the store."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Metadata of the object; empty in lists."""


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
    """Some bytes of an object, with its version."""

    data: bytes
    version: str
    """Version of the object. Other content has another version. Replicas with equal content may
    have different versions. Empty if the store sends none."""


def version_of(meta: Mapping[str, Any]) -> str:
    """Return the version of an object from its metadata: the ETag, or time and size."""
    etag: str = (meta["e_tag"] or "").removeprefix("W/")
    return etag or f"{meta['last_modified'].timestamp()} {meta['size']}"


def cut_short(place: str, end: int, size: int) -> RemoteError:
    """Return the error for a request of bytes up to `end` from an object of `size` bytes."""
    return RemoteError(
        errno.EINVAL,
        f"expected bytes up to {end:,}, got {size:,} in all: it was cut short or replaced. Copy it "
        "again",
        place,
    )


_WHOLE_BYTES = 1 << 20
_FIRST_BYTES, LARGEST_BYTES = 1 << 18, 8 << 20


class Ranges(Protocol):
    """Reads any part of an object."""

    def read_range(self, name: str, start: int, length: int) -> VersionedBytes:
        """Read some bytes of an object by one request; no request for 0 bytes.

        Args:
            name: The object.
            start: The first byte, counted from 0.
            length: Number of bytes.

        Returns:
            Exactly `length` bytes, and the version of the object.

        Raises:
            FileNotFoundError: The object is missing.
            OSError: The object is too short, or the store refuses or cannot be reached.
        """
        ...


def open_ranged(store: Ranges, name: str, size: int) -> pa.NativeFile:
    """Open an object. A small object is read whole."""
    if size <= _WHOLE_BYTES:
        return pa.BufferReader(store.read_range(name, 0, size).data)
    return pa.PythonFile(_RangedFile(store, name, size), mode="r")


def open_ranged_bytes(store: Ranges, name: str, size: int) -> BinaryIO:
    """Open an object as a binary file."""
    return cast(BinaryIO, _RangedFile(store, name, size))


class SeekableFile(io.RawIOBase):
    """A file of known size that can be read at any place. Subclasses implement `_bytes`."""

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
        """Return where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set where the next read begins. Sends no request."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes, at most `size`."""
        left = max(self._size - self._at, 0)
        size = left if size < 0 else min(size, left)
        if not size:
            return b""
        self._at += size
        return self._bytes(self._at - size, size)

    def _bytes(self, at: int, size: int) -> bytes:
        """Return `size` bytes from `at` on. They are inside the file."""
        raise NotImplementedError


class _RangedFile(SeekableFile):
    """Keeps the range that was read last. A range that follows it is twice as long."""

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
        """Read a range from `at` on. Bytes that are kept are not read again."""
        begin, end = at, self._kept_from + len(self._kept)
        follows = self._kept_from <= begin <= end
        head = self._kept[begin - self._kept_from :] if follows else b""
        self._next_bytes = min(2 * self._next_bytes, LARGEST_BYTES) if follows else _FIRST_BYTES
        begin += len(head)
        length = min(max(size - len(head), self._next_bytes), self._size - begin)
        self._kept = head + self._store.read_range(self._name, begin, length).data
        self._kept_from = at


Span = tuple[int, int]
"""First byte, and the byte after the last."""
_FIRST_SPAN_BYTES = 1 << 20
"""First request. Each request is twice as long as the one before, up to the largest."""
_GAP_BYTES = 1 << 18
"""Reading this many unwanted bytes takes less time than another request."""
_SMALL_REST = 4
"""A request also reads the rest of its span if that makes it longer by at most 1/4."""


class SpansFile(SeekableFile):
    """Keeps the most recently used windows, each of about 8 MiB.

    A read outside the spans reads only the requested bytes. A small object is read whole.
    """

    def __init__(self, store: Ranges, name: str, size: int) -> None:
        super().__init__(size)
        self._store, self._name = store, name
        self._spans: list[Span] = [(0, size)] if size <= _GAP_BYTES else []
        self._windows: list[tuple[int, bytes]] = []
        """First byte and content of each window; the most recently used one is last."""
        self._most_windows = 1
        self._next_bytes = _FIRST_SPAN_BYTES

    def expect(self, spans: Iterable[Span], at_once: int) -> None:
        """Set the spans to read, and how many are read in turn. Ignore parts outside the file."""
        inside = ((max(start, 0), min(stop, self._size)) for start, stop in spans)
        self._spans = joined_spans(span for span in inside if span[0] < span[1])
        self._most_windows = at_once + 1

    def _bytes(self, at: int, size: int) -> bytes:
        start, kept = self._taken(at)
        if at + size > start + len(kept):
            self._windows = self._windows[max(len(self._windows) - self._most_windows + 1, 0) :]
            start, kept = self._fetched(at, size, kept[at - start :])
        self._windows.append((start, kept))
        return kept[at - start : at - start + size]

    def _taken(self, at: int) -> tuple[int, bytes]:
        """Remove and return the window with this byte; an empty window if no window has it."""
        for index, (start, kept) in enumerate(self._windows):
            if start <= at < start + len(kept):
                return self._windows.pop(index)
        return at, b""

    def _fetched(self, at: int, size: int, head: bytes) -> tuple[int, bytes]:
        """Read a window with the wanted bytes, which begin with `head`."""
        start, stop = self._request(at + len(head), at + size, has_head=bool(head))
        pieces = [
            self._store.read_range(self._name, begin, min(LARGEST_BYTES, stop - begin)).data
            for begin in range(start, stop, LARGEST_BYTES)
        ]
        return start - len(head), b"".join([head, *pieces])

    def _request(self, start: int, stop: int, *, has_head: bool) -> Span:
        """Return what to request for some bytes: more of their span, or all of it if it fits."""
        index = bisect_right(self._spans, start, key=lambda span: span[0]) - 1
        first, last = self._spans[index] if index >= 0 else (start, start)
        if start >= last:
            return start, stop
        room, self._next_bytes = self._next_bytes, min(2 * self._next_bytes, LARGEST_BYTES)
        if last - first <= room and not has_head:
            return first, max(stop, last)
        if last - start > room + room // _SMALL_REST:
            last = start + room
        return start, max(stop, last)


def joined_spans(spans: Iterable[Span]) -> list[Span]:
    """Join neighbouring spans as far as one request can read them. Return them in order."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1] + _GAP_BYTES:
            first, last = joined[-1]
            if max(stop, last) - first <= LARGEST_BYTES:
                joined[-1] = first, max(stop, last)
                continue
        joined.append((start, stop))
    return joined
