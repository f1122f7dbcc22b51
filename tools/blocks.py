"""The bytes of an input file, decompressed, a block at a time; and the lines in them.

A damaged or shortened archive raises one of `READ_ERRORS` after everything before the damage was
given, so that one bad file costs its own tail and nothing else. Lines end at `\\n` alone.
"""

import gzip
import os
import zlib
from collections.abc import Iterator
from typing import Literal

import zstandard

__all__ = ["READ_ERRORS", "Compression", "read_blocks", "split_lines"]

Compression = Literal["gz", "zst"]

READ_ERRORS = (EOFError, OSError, zlib.error, zstandard.ZstdError)
"""What reading a damaged file can raise."""

BLOCK_BYTES = 1 << 20


def read_blocks(
    path: str, compression: Compression | None = None, start: int = 0, stop: int | None = None
) -> Iterator[bytes]:
    """Blocks of a whole compressed file, or of the bytes `start` to `stop` of a plain one."""
    if compression == "gz":
        return _gzip_blocks(path)
    if compression == "zst":
        return _zstd_blocks(path)
    return _plain_blocks(path, start, os.stat(path).st_size if stop is None else stop)


def split_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their `\\n`; the last needs none. Linear, however long a line is."""
    pieces: list[bytes] = []
    for block in blocks:
        first, *others = block.split(b"\n")
        pieces.append(first)
        if others:
            yield b"".join(pieces)
            yield from others[:-1]
            pieces = [others[-1]]
    if last := b"".join(pieces):
        yield last


def _plain_blocks(path: str, start: int, stop: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(start)
        while start < stop and (block := file.read(min(BLOCK_BYTES, stop - start))):
            start += len(block)
            yield block


def _gzip_blocks(path: str) -> Iterator[bytes]:
    with gzip.open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def _zstd_blocks(path: str) -> Iterator[bytes]:
    """Frame after frame by hand: zstandard's own stream reader takes a cut-off file for its end."""
    frame = None
    for compressed in _plain_blocks(path, 0, os.stat(path).st_size):
        rest = compressed
        while rest:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if block := frame.decompress(rest):
                yield block
            rest = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("the zstd stream ended before its end marker")
