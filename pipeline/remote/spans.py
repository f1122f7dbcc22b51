"""A remote object of which only some spans are read, a little of one and a little of another: as
the columns of a table are, side by side.

Requests grow, and none brings more than is left of its span: what lies between stays where it is.
"""

from bisect import bisect_right
from collections.abc import Iterable

from tokenfeed.pipeline.remote.object_file import LARGEST_BYTES, Ranges, SeekableFile

__all__ = ["Span", "SpansFile", "joined_spans"]

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
