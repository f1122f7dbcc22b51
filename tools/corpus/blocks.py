r"""Read the decompressed bytes of an input file in blocks, and cut blocks into lines.

A compressed file consists of one or more streams (gzip members, zstd frames), each with a checksum
at its end. A damaged file raises one of `READ_ERRORS`. The bytes before the error may be wrong too.
Text of another encoding is converted to UTF-8. Lines end at `\n` only. Memory is bounded, even if a
small file decompresses to gigabytes. Arrow checks UTF-8.
"""

import bz2
import codecs
import errno
import io
import lzma
import os
import re
import string
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import zstandard

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.tools.corpus.locations import Location, open_location

Compression = Literal["gz", "zst", "bz2", "xz"]

READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
"""Exceptions of reading a damaged file."""

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How a pointer of Git LFS begins, which stands for a file that was not downloaded."""

FIRST_BLOCK_BYTES, BLOCK_BYTES = 1 << 18, 1 << 22
"""Bytes of the first and of the largest block. Each block is twice as large as the previous one,
because some callers read only the beginning of a file."""
UNPACKED_BYTES = 1 << 18
_FEWEST_PACKED_BYTES, _MOST_PACKED_BYTES = 1 << 6, 1 << 13
"""Compressed bytes per call of a decompressor: fewer if the ratio is high. zstd decompresses all of
them at once, into up to 32,000 times as many bytes."""
_LARGEST_WINDOW_BYTES = 1 << 31
"""The window of `zstd --long=31`. Only the part with text takes memory."""


@dataclass
class Blocks:
    """An iterator over a compressed file, or over the bytes `start` to `stop` of a plain file."""

    path: Location
    compression: Compression | None = None
    start: int = 0
    stop: int | None = None
    """None reads to the end."""
    consumed_bytes: int = field(default=0, init=False)
    """Number of bytes read from the file, before decompression."""

    def __iter__(self) -> Iterator[bytes]:
        if self.compression is None:
            return self._plain()
        return self._streams(self.compression)

    def _plain(self) -> Iterator[bytes]:
        with open_location(self.path) as file:
            end = file.seek(0, os.SEEK_END) if self.stop is None else self.stop
            file.seek(self.start)
            wanted = FIRST_BLOCK_BYTES
            while (left := end - self.start - self.consumed_bytes) > 0:
                block = file.read(min(wanted, left))
                wanted = min(2 * wanted, BLOCK_BYTES)
                if not block:
                    return
                self.consumed_bytes += len(block)
                yield block

    def _streams(self, compression: Compression) -> Iterator[bytes]:
        """Decompress all streams. File classes of the libraries would take damage for the end."""
        pieces: list[bytes] = []
        waiting = 0
        for piece in self._unpacked(compression):
            pieces.append(piece)
            waiting += len(piece)
            if waiting >= UNPACKED_BYTES:
                yield b"".join(pieces)
                waiting, pieces = 0, []
        if pieces:
            yield b"".join(pieces)

    def _unpacked(self, compression: Compression) -> Iterator[bytes]:
        make, num_bytes, step = _PACKINGS[compression].make, 0, _FEWEST_PACKED_BYTES
        stream: Any = None
        for block in self._plain():
            start = 0
            while start < len(block):
                packed, before = block[start : start + step], num_bytes
                start += step
                while packed := (packed if stream else packed.lstrip(b"\0")):  # zeros may pad
                    stream = stream or make()
                    while not stream.eof and (piece := stream.decompress(packed, UNPACKED_BYTES)):
                        num_bytes += len(piece)
                        yield piece
                        packed = b""
                    packed = stream.unused_data if stream.eof else b""
                    stream = None if stream.eof else stream
                if num_bytes - before > 4 * UNPACKED_BYTES:
                    step = max(step // 2, _FEWEST_PACKED_BYTES)
                elif num_bytes - before < UNPACKED_BYTES:
                    step = min(2 * step, _MOST_PACKED_BYTES)
        if stream:
            raise EOFError("the compressed stream ended before its end marker")


_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # begins with the mark of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def marked_encoding(beginning: bytes) -> str | None:
    """Return the encoding that a byte-order mark at the beginning of a file names; None for UTF-8
    and without a mark."""
    return next((name for mark, name in _MARKS.items() if beginning.startswith(mark)), None)


_FEWEST_NULS, _SHARE_OF_NULS = 8, 0.1
"""The fewest NULs in every second byte of UTF-16 that is not short, and their least share: spaces
have one in any language."""


def unmarked_encoding(beginning: bytes) -> str | None:
    """Return UTF-16 or UTF-32 for a text without a byte-order mark, by the places of its NULs; None
    for other texts."""
    if len(beginning) < 2 or b"\0" not in beginning:
        return None
    is_nul = np.frombuffer(beginning, np.uint8) == 0
    count, by_place = len(is_nul) // 4, [is_nul[place::4].sum() for place in range(4)]
    for high, next_, low, ending in ((3, 2, 0, "le"), (0, 1, 3, "be")):
        if by_place[high] == count and by_place[next_] > 0.99 * count > 2 * by_place[low]:
            return f"utf-32-{ending}"
    pairs = is_nul[: len(is_nul) // 2 * 2].reshape(-1, 2)
    if pairs.all(1).any():  # a text has no NUL
        return None
    even, odd = pairs.sum(0)
    fewest = max(_SHARE_OF_NULS * 2 * count, min(_FEWEST_NULS, ceil_div(len(is_nul), 4)))
    if max(even, odd) < max(fewest, 20 * min(even, odd)):
        return None
    return "utf-16-le" if odd > even else "utf-16-be"


def _check_unmarked(beginning: bytes, given: str | None) -> None:
    """Check that a text is not UTF-16 or UTF-32 without a byte-order mark, unless `given` is that.

    Raises:
        UnicodeError: Names the encoding to give.
    """
    found = unmarked_encoding(beginning)
    if found and "a".encode(found) != "a".encode(given or "utf-8"):
        raise UnicodeError(f"looks like {found} without a byte-order mark. Give --encoding {found}")


@dataclass
class TextBlocks(Blocks):
    """An iterator over the text of a file as UTF-8. A block may end within a character.

    Text with the byte-order mark of UTF-16 or UTF-32 is converted, and text that is not UTF-8 if
    its encoding is given. To find that it is not UTF-8, the file is read once more.

    ASCII is read in the given encoding, because ISO-2022, HZ and UTF-7 have no other bytes. If the
    encoding has other letters than ASCII (UTF-16, UTF-32, EBCDIC), ASCII without NUL stays as it
    is, and so does what cannot be UTF-16, to be rejected.
    """

    encoding: str | None = None
    """The encoding of text that is not UTF-8."""
    enough_bytes: int | None = None
    """Decompressed bytes that decide whether text is UTF-8. None: all."""

    def __iter__(self) -> Iterator[bytes]:
        blocks = super().__iter__()
        first = next(blocks, b"")
        encoding = None if self.start else marked_encoding(first)
        if encoding is None and self.enough_bytes is None:
            _check_unmarked(first, self.encoding)
        if encoding is None and self.encoding and not self._is_utf8(self.encoding):
            encoding = self.encoding
        blocks = chain([first] if first else [], blocks)
        return _converted(blocks, encoding) if encoding else blocks

    def _is_utf8(self, other: str) -> bool:
        """Return whether the text is UTF-8, and not of the other encoding."""
        again = Blocks(self.path, self.compression, self.start, self.stop)
        decoder = codecs.getincrementaldecoder("utf-8")()
        has_other_letters, is_ascii, num_bytes = "a".encode(other) != b"a", True, 0
        try:
            for block in again:
                decoder.decode(block)
                if has_other_letters and b"\0" in block:
                    return False
                is_ascii, num_bytes = is_ascii and block.isascii(), num_bytes + len(block)
                if self.enough_bytes is not None and num_bytes >= self.enough_bytes:
                    break
            else:
                decoder.decode(b"", final=self.stop is None)
        except UnicodeDecodeError:
            return is_wide(other) and _is_narrow(block)
        return has_other_letters or not is_ascii


def is_wide(encoding: str) -> bool:
    """Return whether an encoding writes a NUL beside a letter of ASCII, as UTF-16 does."""
    return b"\0" in "a".encode(encoding)


def _is_narrow(text: bytes) -> bool:
    """Return whether a text is no UTF-16 or UTF-32: it has almost only letters of ASCII, and no NUL
    beside them. Decoded nevertheless, it would be Chinese."""
    others = text.translate(None, string.printable.encode())
    return b"\0" not in text and 5 * len(others) < len(text)


def _converted(blocks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)()
    for block in chain(blocks, (b"",)):
        if text := decoder.decode(block, final=not block):
            yield text.encode()


class _GzipStream:
    """A gzip member with the methods that the standard library's decompressors have."""

    def __init__(self) -> None:
        self._stream: Any = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return bool(self._stream.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._stream.unused_data)

    def decompress(self, packed: bytes, max_length: int) -> bytes:
        return bytes(self._stream.decompress(self._stream.unconsumed_tail + packed, max_length))


class _ZstdStream(_GzipStream):
    """A zstandard frame with the same methods. It decompresses all that it gets at once."""

    def __init__(self) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES)
        self._stream = decompressor.decompressobj()

    def decompress(self, packed: bytes, max_length: int) -> bytes:
        return bytes(self._stream.decompress(packed)) if packed else b""


class _Packing(NamedTuple):
    """A compression of files."""

    endings: tuple[str, ...]
    """Endings of file names."""
    magic: bytes
    """How a file begins."""
    make: Callable[[], Any]
    """Makes a decompressor of one stream."""


_PACKINGS: dict[Compression, _Packing] = {
    "gz": _Packing((".gz",), b"\x1f\x8b", _GzipStream),
    "zst": _Packing((".zst", ".zstd"), b"(\xb5/\xfd", _ZstdStream),
    "bz2": _Packing((".bz2",), b"BZh", bz2.BZ2Decompressor),
    "xz": _Packing((".xz",), b"\xfd7zXZ\0", lzma.LZMADecompressor),
}
COMPRESSIONS: dict[str, Compression] = {
    ending: name for name, packing in _PACKINGS.items() for ending in packing.endings
}
"""By the last ending of a file name."""


def compression_of(name: str) -> Compression | None:
    """Return the compression of a file by the last ending of its name."""
    return COMPRESSIONS.get(os.path.splitext(name.lower())[1])


def packed_ending(beginning: bytes) -> str:
    """Return the ending of compressed files that begin so; empty for other files."""
    kinds = _PACKINGS.values()
    return next((kind.endings[0] for kind in kinds if beginning.startswith(kind.magic)), "")


class LongLine(NamedTuple):
    """A line that is too long, and was dropped."""

    num_bytes: int


class BlockFile(io.RawIOBase):
    """A binary file with the bytes of an iterable of blocks."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._rest = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Copy bytes of the present block into a buffer. Return their number."""
        self._rest = self._rest or memoryview(next(self._blocks, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        self._position += count
        return count

    def tell(self) -> int:
        """Return the number of bytes read."""
        return self._position


def whole_lines(blocks: Iterable[bytes], most_bytes: int) -> Iterator[bytes | LongLine]:
    """Yield the bytes of blocks as blocks of whole lines. The last line may lack its newline.

    A line of more than `most_bytes` is dropped while it is read, and a `LongLine` is yielded.
    """
    pieces: list[bytes] = []
    num_bytes = 0  # of a line whose end has not come
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if cut and num_bytes > most_bytes:
            end = block.index(b"\n")
            yield LongLine(num_bytes + end)
            yield from _short_lines(block[end + 1 : cut], most_bytes)
        elif cut:
            yield from _short_lines(b"".join([*pieces, block[:cut]]), most_bytes)
        if cut:
            pieces, num_bytes, block = [], 0, block[cut:]
        num_bytes += len(block)
        if num_bytes > most_bytes:
            pieces.clear()
        elif block:
            pieces.append(block)
    if num_bytes > most_bytes:
        yield LongLine(num_bytes)
    elif pieces:
        yield b"".join(pieces)


def _short_lines(data: bytes, most_bytes: int) -> Iterator[bytes | LongLine]:
    """Yield whole lines, with a `LongLine` for each line of more than `most_bytes`."""
    if len(data) <= most_bytes:
        if data:
            yield data
        return
    start = end = 0
    for line in data.removesuffix(b"\n").split(b"\n"):
        if len(line) > most_bytes:
            if start < end:
                yield data[start:end]
            yield LongLine(len(line))
            start = end + len(line) + 1
        end += len(line) + 1
    if start < len(data):
        yield data[start:]


def is_utf8(block: bytes) -> bool:
    """Return whether a block is valid UTF-8."""
    if block.isascii():
        return True
    ends = pa.py_buffer(np.array([0, len(block)], np.int64))
    text = pa.LargeStringArray.from_buffers(1, ends, pa.py_buffer(block))
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


DAMAGE = (*READ_ERRORS, pa.ArrowException, ValueError, RecursionError)
_ALLOCATION = re.compile(r"\bsize \d{14,}\b|\bcapacity too large\b")
"""Matches the errors of an allocation that is too large for any machine, because a length is
damaged."""
_MACHINE_IS_FULL = {errno.ENOMEM, errno.EMFILE, errno.ENFILE}
IS_UNREADABLE = {errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
"""Errors of a disk or of rights, which a later run may not meet."""


def damage_reason(error: Exception) -> str:
    """Return the damage of a file as one line.

    Raises:
        Exception: `error` itself, if the machine lacks memory or file descriptors, or refuses to
            read the file.
    """
    is_shortage = isinstance(error, MemoryError) and not _ALLOCATION.search(str(error))
    if is_shortage or getattr(error, "errno", None) in _MACHINE_IS_FULL | IS_UNREADABLE:
        raise error
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split())
