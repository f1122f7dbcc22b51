"""Rows of token ids in the files of datatrove, `.ds`, with an index and a width beside them.

There are no checksums: borders of rows that contradict the size of a file are found, and changed
ids are not.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.sample_containers import name_of, records_of_tables
from tokenfeed.tools.corpus.input_files import FilePart, InputFile, whole
from tokenfeed.tools.corpus.locations import Location, beside, open_location, read_array, size_of
from tokenfeed.tools.corpus.records import Fields, Records

_BATCH_TOKENS = 1 << 20


def _beside(source: InputFile, ending: str) -> Location:
    """Return the place of a file whose name has one more ending.

    Raises:
        ValueError: The file is missing.
    """
    name = f"{name_of(source.path)}{ending}"
    place = beside(source.path, name)
    if place is None:
        raise ValueError(f"{name} is missing beside it")
    return place


def _width(source: InputFile) -> int:
    """Return the bytes of an id, which `.ds.metadata` has behind the name of the tokenizer."""
    with open_location(_beside(source, ".metadata")) as file:
        width = file.read(1 << 16).split(b"\n")[0].strip().rpartition(b"|")[2]
    if width not in (b"2", b"4"):
        raise ValueError(f"{source.name}.metadata: names ids of {width!r} bytes, expected 2 or 4")
    return int(width)


def _ends(source: InputFile, start: int, stop: int | None) -> np.ndarray:
    """Return the ends of the rows `start` to `stop`, after the end of the row before, in ids.

    Raises:
        ValueError: The rows are out of order, or end behind the file.
    """
    index, first = _beside(source, ".index"), max(start - 1, 0)
    count = (size_of(index) // 8 if stop is None else stop) - first
    ends = read_array(index, "<i8", 8 * first, count)
    ends = ends if start else np.append(0, ends)
    size, rest = divmod(source.bytes, _width(source))
    is_whole = stop is not None or ends[-1] == size
    is_inside = ends.min() >= 0 and ends.max() <= size  # or their differences could overflow
    if rest or not is_inside or (np.diff(ends) < 0).any() or not is_whole:
        raise ValueError(
            f"{source.name}.index: its rows are out of order, or do not fill the file of ids"
        )
    return ends


def _cut(source: InputFile, shard_bytes: int) -> Iterator[FilePart]:
    """Yield rows with about `shard_bytes` of ids. A file that cannot be read stays whole, to be
    rejected as such."""
    try:
        ends = _ends(source, 0, None) * _width(source)
    except (OSError, ValueError):
        yield from whole(source, shard_bytes)
        return
    row = 0
    while row < len(ends) - 1:
        stop = int(np.searchsorted(ends, ends[row] + shard_bytes))
        stop = min(max(stop, row + 1), len(ends) - 1)
        weight = int(ends[stop] - ends[row])
        yield FilePart(source=source, start=row, stop=stop, first_record=row, weight_bytes=weight)
        row = stop


def _read(part: FilePart, fields: Fields) -> Iterator[Records]:
    ends = _ends(part.source, part.start, part.stop)
    per_row = part.weight_bytes / max(len(ends) - 1, 1)
    for records in records_of_tables(_tables(part.source, ends), part, fields):
        yield replace(records, weight_bytes=per_row * len(records))


def _tables(source: InputFile, ends: np.ndarray) -> Iterator[pa.RecordBatch]:
    """Yield rows by their ends, some at a time."""
    width = _width(source)
    while len(ends) > 1:
        count = max(int(np.searchsorted(ends, ends[0] + _BATCH_TOKENS)), 1)
        some, ends = ends[: count + 1], ends[count:]
        count = int(some[-1] - some[0])
        ids = read_array(source.path, f"<u{width}", width * int(some[0]), count)
        rows = pa.ListArray.from_arrays(pa.array(some - some[0], pa.int32()), pa.array(ids))
        yield pa.record_batch({"input_ids": rows})


DATATROVE = Format(name="datatrove", endings=(".ds",), read=_read, cut=_cut)
