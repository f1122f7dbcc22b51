"""The bytes of an input file, decompressed, a block at a time; and the lines in them.

A damaged or shortened archive raises one of `READ_ERRORS` after everything before the damage was
given, so that one bad file costs its own tail and nothing else. Lines end at `\\n` alone.
"""

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import zstandard

from tokenfeed.tools.corpus.places import Place, open_place

__all__ = ["READ_ERRORS", "Blocks", "Compression", "whole_lines"]

Compression = Literal["gz", "zst", "bz2", "xz"]

READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
"""What reading a damaged file can raise."""

_FIRST_BLOCK_BYTES, _BLOCK_BYTES = 1 << 18, 1 << 22
"""Blocks begin small and double in size, for callers who only look at the beginning of a file."""
_PACKED_BYTES, _UNPACKED_BYTES = 1 << 14, 1 << 18
"""Bytes unpacked at once, before and after: at most so many are lost in front of a damage."""

_LARGEST_WINDOW_BYTES = 1 << 31
"""What `zstd --long=31` makes; it takes memory only as far as text fills it."""
_DECOMPRESSORS: dict[Compression, Callable[[], Any]] = {
    "bz2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
    "zst": lambda: _ZstdMember(),
}


class Blocks:
    """Iterates over a whole compressed file, or over the bytes `start` to `stop` of a plain one."""

    def __init__(
        self,
        path: Place,
        compression: Compression | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self.consumed_bytes = 0
        """Bytes of the file itself behind the blocks given so far."""
        self._path = path
        self._compression: Compression | None = compression
        self._start, self._stop = start, stop

    def __iter__(self) -> Iterator[bytes]:
        if self._compression is None:
            return self._plain()
        if self._compression == "gz":
            return self._gzip()
        return self._members(_DECOMPRESSORS[self._compression])

    def _plain(self) -> Iterator[bytes]:
        with open_place(self._path) as file:
            end = file.seek(0, os.SEEK_END) if self._stop is None else self._stop
            file.seek(self._start)
            wanted = _FIRST_BLOCK_BYTES
            while (left := end - self._start - self.consumed_bytes) > 0:
                block = file.read(min(wanted, left))
                wanted = min(2 * wanted, _BLOCK_BYTES)
                if not block:
                    return
                self.consumed_bytes += len(block)
                yield block

    def _gzip(self) -> Iterator[bytes]:
        with open_place(self._path) as raw, gzip.open(raw) as file:
            while block := file.read(_UNPACKED_BYTES):
                self.consumed_bytes = raw.tell()
                yield block

    def _slices(self) -> Iterator[bytes]:
        """Small slices of the file, since each may unpack to many times its size."""
        for block in self._plain():
            for start in range(0, len(block), _PACKED_BYTES):
                yield block[start : start + _PACKED_BYTES]

    def _members(self, make: Callable[[], Any]) -> Iterator[bytes]:
        """Unpack one stream after the other; the libraries' own files take damage for the end."""
        member: Any = None
        for packed in self._slices():
            while packed := (packed if member else packed.lstrip(b"\0")):  # zeros may pad
                member = member or make()
                yield from _unpacked(member, packed)
                packed = member.unused_data if member.eof else b""
                if member.eof:
                    member = None
        if member:
            raise EOFError("the compressed stream ended before its end marker")


class _ZstdMember:
    """A zstandard frame with the methods that the standard library's decompressors have."""

    def __init__(self) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES)
        self._frame = decompressor.decompressobj()

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    def decompress(self, packed: bytes, max_length: int) -> bytes:
        return self._frame.decompress(packed) if packed else b""


def _unpacked(member: Any, packed: bytes) -> Iterator[bytes]:
    """What `packed` holds of one stream, about `_UNPACKED_BYTES` at a time."""
    while not member.eof and (block := member.decompress(packed, _UNPACKED_BYTES)):
        yield block
        packed = b""


def whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes, cut behind newlines; the last line needs none. Linear for any long line."""
    pieces: list[bytes] = []
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if not cut:
            pieces.append(block)
            continue
        yield b"".join([*pieces, block[:cut]])
        pieces = [block[cut:]] if cut < len(block) else []
    if rest := b"".join(pieces):
        yield rest
