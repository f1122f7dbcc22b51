"""Cut files of lines at newlines.

Its price: a big file is read once more, to count the records before each cut. Where the cuts are
needs only a look around each, so its parts are counted at once.
"""

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np

from tokenfeed.pipeline.feeding.cores import num_cores
from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.tools.corpus.blocks import Blocks
from tokenfeed.tools.corpus.input_files import FilePart, InputFile, whole

__all__ = ["cut_lines"]

_MOST_AT_ONCE = 8
"""Ranges of an object that are counted at the same time, and of a file as far as there are cores:
each takes some 10 MB."""
_COUNTED_BYTES = 1 << 18
"""At once: what is compared stays in the cache of a core."""


def cut_lines(source: InputFile, shard_bytes: int) -> Iterator[FilePart]:
    """Byte ranges of nearly equal size, each ending behind a newline.

    A compressed file cannot be entered in the middle, and stays whole.
    """
    if source.compression or source.bytes <= shard_bytes:
        yield from whole(source, shard_bytes)
        return
    goal_bytes = source.bytes / math.ceil(source.bytes / shard_bytes)
    ranges = list(pairwise(_cuts(source, goal_bytes)))
    firsts = accumulate(_newlines(source, ranges), initial=0)
    for (start, stop), first_record in zip(ranges, firsts, strict=False):
        yield _range(source, start, stop, first_record)


def _cuts(source: InputFile, goal_bytes: float) -> Iterator[int]:
    """Where parts begin, and the end of the file."""
    start = 0
    while start < source.bytes:
        yield start
        start = _behind_newline(source, math.ceil(start + goal_bytes) - 1)
    yield source.bytes


def _behind_newline(source: InputFile, position: int) -> int:
    """Behind the first newline from `position` on, or the end of the file."""
    for block in Blocks(source.path, None, position, source.bytes):
        if (newline := block.find(b"\n")) >= 0:
            return position + newline + 1
        position += len(block)
    return source.bytes


def _newlines(source: InputFile, ranges: list[tuple[int, int]]) -> Iterator[int]:
    """How many newlines there are in each range."""
    at_once = min(num_cores(), _MOST_AT_ONCE) if isinstance(source.path, str) else _MOST_AT_ONCE
    return results_of(lambda range_: _num_newlines(source, *range_), ranges, at_once)


def _num_newlines(source: InputFile, start: int, stop: int) -> int:
    return sum(map(_count, Blocks(source.path, None, start, stop)))


def _count(block: bytes) -> int:
    """Half the time of `bytes.count`, which looks at one byte after the other."""
    characters = np.frombuffer(block, np.uint8)
    pieces = (characters[at : at + _COUNTED_BYTES] for at in range(0, len(block), _COUNTED_BYTES))
    return sum(int(np.count_nonzero(piece == ord("\n"))) for piece in pieces)


def _range(source: InputFile, start: int, stop: int, first_record: int) -> FilePart:
    return FilePart(
        source=source,
        start=start,
        stop=stop,
        first_record=first_record,
        weight_bytes=stop - start,
    )
