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

__all__ = [
    "LARGEST_BYTES",
    "FileFacts",
    "ObjectInfo",
    "Ranges",
    "SeekableFile",
    "Span",
    "SpansFile",
    "VersionedBytes",
    "cut_short",
    "joined_spans",
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


Span = tuple[int, int]
"""Where some bytes begin, and where they end."""
_FIRST_BYTES = 1 << 20
"""For who looks at a beginning alone; each request is twice the one before, up to the largest."""
_GAP_BYTES = 1 << 18
"""To read so much that is not wanted takes less time than another request."""
_SMALL_REST = 4
"""A span's rest goes with a request that it makes longer by one in so many."""


class SpansFile(SeekableFile):
    """Keeps the windows that were used last, each of some 8 MiB.

    A read outside of the spans brings what it asks for and no more; a small object comes whole.
    """

    def __init__(self, store: Ranges, name: str, size: int) -> None:
        super().__init__(size)
        self._store, self._name = store, name
        self._spans: list[Span] = [(0, size)] if size <= _GAP_BYTES else []
        self._windows: list[tuple[int, bytes]] = []
        """Where each begins, and its bytes; the one used last is the last."""
        self._most_windows = 1
        self._next_bytes = _FIRST_BYTES

    def expect(self, spans: Iterable[Span], at_once: int) -> None:
        """Say what will be read, and in how many places in turn; a span may be a false one."""
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
        """The window that has this byte, no longer kept; an empty one where there is none."""
        for index, (start, kept) in enumerate(self._windows):
            if start <= at < start + len(kept):
                return self._windows.pop(index)
        return at, b""

    def _fetched(self, at: int, size: int, head: bytes) -> tuple[int, bytes]:
        """A window with the bytes wanted, of which `head` is at hand."""
        start, stop = self._request(at + len(head), at + size, has_head=bool(head))
        pieces = [
            self._store.read_range(self._name, begin, min(LARGEST_BYTES, stop - begin)).data
            for begin in range(start, stop, LARGEST_BYTES)
        ]
        return start - len(head), b"".join([head, *pieces])

    def _request(self, start: int, stop: int, *, has_head: bool) -> Span:
        """What to ask for where these bytes are wanted: more of their span, or all if it fits."""
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
    """The same with neighbours together, as far as one request brings them; in order."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1] + _GAP_BYTES:
            first, last = joined[-1]
            if max(stop, last) - first <= LARGEST_BYTES:
                joined[-1] = first, max(stop, last)
                continue
        joined.append((start, stop))
    return joined
