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
from typing import IO, Any, Literal

import zstandard

__all__ = ["READ_ERRORS", "Blocks", "Compression", "whole_lines"]

Compression = Literal["gz", "zst", "bz2", "xz"]

READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
"""What reading a damaged file can raise."""

_BLOCK_BYTES = 1 << 22
_PACKED_BYTES, _UNPACKED_BYTES = 1 << 14, 1 << 18
"""What is unpacked at once: so much may be lost before a damage, however late it comes."""

_OPENERS: dict[Compression, Callable[[IO[bytes]], Any]] = {
    "gz": gzip.open,
    "bz2": bz2.open,
    "xz": lzma.open,
}


class Blocks:
    """Iterates over a whole compressed file, or over the bytes `start` to `stop` of a plain one."""

    def __init__(
        self,
        path: str,
        compression: Compression | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self.consumed_bytes = 0
        """Bytes of the file itself behind the blocks given so far."""
        self._path = path
        self._compression = compression
        self._start, self._stop = start, stop

    def __iter__(self) -> Iterator[bytes]:
        if self._compression is None:
            return self._plain()
        if self._compression == "zst":
            return self._zstd()
        return self._through(_OPENERS[self._compression])

    def _plain(self) -> Iterator[bytes]:
        with open(self._path, "rb", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size if self._stop is None else self._stop
            file.seek(self._start)
            while (left := end - self._start - self.consumed_bytes) > 0:
                block = file.read(min(_BLOCK_BYTES, left))
                if not block:
                    return
                self.consumed_bytes += len(block)
                yield block

    def _through(self, opener: Callable[[IO[bytes]], Any]) -> Iterator[bytes]:
        with open(self._path, "rb") as raw, opener(raw) as file:
            while block := file.read(_UNPACKED_BYTES):
                self.consumed_bytes = raw.tell()
                yield block

    def _slices(self) -> Iterator[bytes]:
        """Small ones, for nobody knows how much is packed in them."""
        for block in self._plain():
            for start in range(0, len(block), _PACKED_BYTES):
                yield block[start : start + _PACKED_BYTES]

    def _zstd(self) -> Iterator[bytes]:
        """Frame after frame by hand: zstandard's stream reader takes a cut-off file for its end."""
        frame: Any = None
        for rest in self._slices():
            while rest:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                if block := frame.decompress(rest):
                    yield block
                rest = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame = None
        if frame is not None:
            raise EOFError("the zstd stream ended before its end marker")


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
