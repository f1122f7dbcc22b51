"""A stitched file: ranges of other files, and some bytes of its own, read as one file.

A shard of an adopted data set is stored so: the tokens stay in the file that they came in, and the
schema, the offsets of rows and the checksums are the file's own bytes. The layout is the magic, the
length of a JSON header (uint32), the header, for each piece three int64 (its first byte in the
stitched file, its file or -1, its first byte there), and the own bytes. Wrong pieces give wrong
bytes, which the checksums of record batches detect, as in any shard.
"""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import numpy as np

from tokenfeed.pipeline.format.storage import open_regular
from tokenfeed.pipeline.remote.object_file import SeekableFile

STITCHED_SUFFIX = ".stitched"
"""Follows the name of the shard."""
_MAGIC = b"tokenfeed stitched 1\n"
_OWN = -1
_LONGEST_HEADER = 1 << 24
_MOST_BYTES = 1 << 61
"""Bytes of any file. So the sum of two places is a place that the system knows."""


class OtherFile(NamedTuple):
    """A file with the bytes of some pieces."""

    path: str
    """Absolute path, or the address of an object."""
    bytes: int
    """Its size when it was stitched."""


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    pieces: int
    files: tuple[OtherFile, ...]


def write_stitched(
    file: IO[bytes], files: tuple[OtherFile, ...], pieces: np.ndarray, size: int, own: bytes
) -> None:
    """Write a stitched file.

    Args:
        file: Where to.
        files: The other files.
        pieces: First byte in the stitched file, index of the other file or -1, and first byte
            there; shape (P, 3), int64, rising.
        size: Bytes of the stitched file.
        own: Its own bytes.
    """
    header = msgspec.json.encode(_Header(size, len(pieces), files))
    file.write(_MAGIC + np.uint32(len(header)).tobytes() + header)
    file.write(np.ascontiguousarray(pieces, "<i8").tobytes())
    file.write(own)


def is_stitched(path: str) -> bool:
    """Return whether a stitched file stands for the file at a path."""
    return os.path.exists(path + STITCHED_SUFFIX)


def stitched_size(path: str) -> int:
    """Return the size of the file that a stitched file stands for.

    Raises:
        OSError: It cannot be read.
    """
    with open_regular(path) as file:
        return _read_header(file, path)[0].bytes


ReadAt = Callable[[int, int], bytes]
"""Returns some bytes of a file, by their number and the first one."""


class StitchedFile(SeekableFile):
    """Reads a stitched file. Several threads may not share it."""

    def __init__(self, path: str, open_address: Callable[[str], ReadAt]) -> None:
        """Open the file and all others that it needs.

        Args:
            path: The stitched file.
            open_address: Opens a file in a store.

        Raises:
            OSError: One of them is missing, damaged, or of another size than it was. In a store,
                a file is first asked for when it is read.
        """
        self._descriptors: list[int] = []
        try:
            with open_regular(path) as file:
                header, first = _read_header(file, path)
                pieces = np.frombuffer(file.read(24 * header.pieces), "<i8").reshape(-1, 3)
                if not 0 < len(pieces) == header.pieces:
                    raise ValueError("was cut short")
                self._descriptors.append(os.dup(file.fileno()))
            self._files: list[ReadAt] = [partial(os.pread, self._descriptors[0])]
            for other in header.files:
                if "://" in other.path:
                    self._files.append(open_address(other.path))
                else:
                    self._descriptors.append(_opened(other, path))
                    self._files.append(partial(os.pread, self._descriptors[-1]))
        except BaseException as error:
            self.close()
            if isinstance(error, ValueError):
                raise _damaged(path) from None
            raise
        super().__init__(header.bytes)
        self._starts, files, places = pieces.T
        is_rising = self._starts[0] == 0 and (self._starts[1:] > self._starts[:-1]).all()
        are_known = files.min() >= _OWN and files.max() < len(header.files)
        ends_inside = self._starts[-1] < header.bytes
        are_places = places.min() >= 0 and places.max() <= _MOST_BYTES
        if not (is_rising and ends_inside and are_known and are_places):
            self.close()
            raise _damaged(path)
        self._file_of = (files + 1).tolist()
        self._places = (places + (files == _OWN) * (first + 24 * header.pieces)).tolist()
        self._ends = [*self._starts[1:].tolist(), header.bytes]

    def _bytes(self, at: int, size: int) -> bytes:
        """Return `size` bytes from `at` on; fewer at a file that was cut short."""
        piece = int(np.searchsorted(self._starts, at, side="right")) - 1
        stop, parts = at + size, []
        while at < stop:
            end = min(self._ends[piece], stop)
            place = self._places[piece] + at - int(self._starts[piece])
            part = self._files[self._file_of[piece]](end - at, place)
            if not part:
                break
            parts.append(part)
            at += len(part)
            piece += at == self._ends[piece]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close all files."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        super().close()


def _opened(other: OtherFile, path: str) -> int:
    """Open another file, which must have the size that it had."""
    try:
        with open_regular(other.path) as file:
            descriptor = os.dup(file.fileno())
    except OSError as error:
        reason = f"the adopted file {other.path} cannot be opened: {error.strerror}"
        raise OSError(errno.EINVAL, reason, path) from None
    if (size := os.fstat(descriptor).st_size) != other.bytes:
        os.close(descriptor)
        reason = f"the adopted file {other.path} has {size:,} bytes, and had {other.bytes:,}"
        raise OSError(errno.EINVAL, reason, path)
    return descriptor


def _read_header(file: IO[bytes], path: str) -> tuple[_Header, int]:
    """Return the header, and where the pieces begin."""
    beginning = file.read(len(_MAGIC) + 4)
    length = int.from_bytes(beginning[-4:], "little")
    if beginning[:-4] != _MAGIC or length > _LONGEST_HEADER:
        raise _damaged(path)
    try:
        header = msgspec.json.decode(file.read(length), type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _damaged(path) from None
    is_possible = 1 <= header.pieces <= Path(path).stat().st_size
    if not is_possible or not 1 <= header.bytes <= _MOST_BYTES:
        raise _damaged(path)
    return header, len(beginning) + length


def _damaged(path: str) -> OSError:
    return OSError(errno.EINVAL, "the stitched file is damaged; adopt the tokens again", path)
