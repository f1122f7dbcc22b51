"""Shards of mosaicml-streaming, `.mds`, plain or compressed: `.mds.zstd`, `.mds.gz`, `.mds.bz2`.

A shard is the number of samples n, n + 1 offsets of samples, all uint32, and a JSON object with the
columns and their encodings, then the samples. A sample is the sizes of its columns without a fixed
size, as uint32, then the columns. Arrays of one dimension, texts and numbers are read; columns with
other encodings, such as pickled objects and images, are left out.
"""

import json
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.installed import read_by
from tokenfeed.tools.corpus.input_files import MAX_RECORD_BYTES, FilePart
from tokenfeed.tools.corpus.records import Fields, Records, too_long

_CHUNK_BYTES = 4 << 20
_ARRAYS = {
    8: "u1",
    9: "i1",
    16: "<u2",
    17: "<i2",
    18: "<f2",
    32: "<u4",
    33: "<i4",
    34: "<f4",
    64: "<u8",
    65: "<i8",
    66: "<f8",
}
"""dtype by the code in the first byte of an array whose encoding names none."""
_NUMBERS = {"int": np.dtype("<i8")} | {
    np.dtype(code).name: np.dtype(code) for code in _ARRAYS.values()
}


def read_mds(file: BinaryIO, most_bytes: int = MAX_RECORD_BYTES) -> Iterator[pa.Table]:
    """Yield the samples of a shard, some at a time.

    Args:
        file: The shard, decompressed.
        most_bytes: Greatest size of a sample, and of all offsets. A small compressed shard may
            claim gigabytes.

    Raises:
        ValueError: The shard is damaged.
    """
    most_bytes = max(most_bytes, _CHUNK_BYTES)
    read = partial(_read, file, most_bytes=most_bytes)
    count = int(read(4).view("<u4")[0])
    first = 4 * (count + 2)
    offsets = read(first - 4).view("<u4").astype(np.int64)
    if offsets[0] < first or (np.diff(offsets) < 0).any():
        raise ValueError("the offsets of its samples are not inside the file")
    config = json.loads(read(int(offsets[0]) - first).tobytes())
    columns = list(
        zip(
            config["column_names"],
            config["column_encodings"],
            config["column_sizes"],
            strict=True,
        )
    )
    start = 0
    while start < count:
        full = np.searchsorted(offsets, offsets[start] + _CHUNK_BYTES, "right") - 1
        stop = min(max(int(full), start + 1), count)
        data = read(int(offsets[stop] - offsets[start]))
        yield _table(data, offsets[start : stop + 1] - offsets[start], columns)
        start = stop
    if file.read(1):
        raise ValueError("the offsets of its samples do not fill the file")


def _read(file: BinaryIO, num_bytes: int, *, most_bytes: int) -> np.ndarray:
    """Return the next bytes.

    Raises:
        ValueError: There are more than `most_bytes`, or the file ends within them.
    """
    if num_bytes > most_bytes:
        raise ValueError(f"a sample, or the head, {too_long(num_bytes, most_bytes)}")
    content = file.read(num_bytes)
    if len(content) < num_bytes:
        raise ValueError("ends before its content does")
    return np.frombuffer(content, np.uint8)


def _table(
    data: np.ndarray, offsets: np.ndarray, columns: list[tuple[str, str, int | None]]
) -> pa.Table:
    """Decode the samples between offsets."""
    headers = offsets[:-1].copy()
    places = headers + 4 * sum(size is None for _, _, size in columns)
    table: dict[str, pa.Array] = {}
    for name, encoding, fixed in columns:
        sizes = np.full(len(places), fixed or 0, np.int64)
        if fixed is None:
            sizes = _numbers(data, headers, "<u4").astype(np.int64)
            headers += 4
        if (places + sizes > offsets[1:]).any():
            raise ValueError(f"column {name!r} is larger than its sample")
        column = _column(data, encoding, places, sizes)
        if column is not None:
            table[name] = column
        places = places + sizes
    if (places != offsets[1:]).any():
        raise ValueError("the columns of a sample do not fill it")
    return pa.table(table)


def _column(
    data: np.ndarray, encoding: str, places: np.ndarray, sizes: np.ndarray
) -> pa.Array | None:
    """Return the values of a column; None if they are not read."""
    kind, *arguments = encoding.split(":")
    if kind == "ndarray":
        return _arrays(data, arguments, places, sizes)
    if kind in _NUMBERS:
        return pa.array(_values(data, places, sizes, _NUMBERS[kind]))
    if kind == "str":
        ends = np.cumsum(sizes, dtype=np.int32)
        content = pa.py_buffer(_values(data, places, sizes, np.dtype("u1")))
        starts = pa.py_buffer(np.concatenate([np.zeros(1, np.int32), ends]))
        texts = pa.StringArray.from_buffers(len(sizes), starts, content)
        texts.validate(full=True)
        return texts
    return None


def _arrays(
    data: np.ndarray, arguments: list[str], places: np.ndarray, sizes: np.ndarray
) -> pa.Array:
    """Return a column of arrays. Their dtype and shape are fixed, or at the start of each."""
    if arguments:
        dtype = _NUMBERS[arguments[0]]
    else:
        codes = np.unique(_values(data, places, np.ones_like(sizes), np.dtype("u1"))).tolist()
        if len(codes) != 1:
            raise ValueError("the arrays of a column have several types")
        dtype, places, sizes = np.dtype(_ARRAYS[codes[0]]), places + 1, sizes - 1
    if len(arguments) == 2:
        if "," in arguments[1]:
            raise ValueError(f"expected arrays of one dimension, got the shape {arguments[1]}")
        lengths = np.full(len(sizes), int(arguments[1]))
    else:
        heads = _numbers(data, places, "u1")
        if (heads >> 2 != 1).any():
            raise ValueError("expected arrays of one dimension")
        widths, lengths = 1 << (heads & 3).astype(np.int64), np.zeros(len(sizes), np.int64)
        for width in np.unique(widths).tolist():
            chosen = widths == width
            lengths[chosen] = _numbers(data, places[chosen] + 1, f"<u{width}")
        places, sizes = places + 1 + widths, sizes - 1 - widths
    if (lengths * dtype.itemsize != sizes).any():
        raise ValueError("an array has another size than its length says")
    values = pa.array(_values(data, places, sizes, dtype))
    ends = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    return pa.ListArray.from_arrays(ends, values)


def _numbers(data: np.ndarray, places: np.ndarray, dtype: str) -> np.ndarray:
    """Return the number at each place."""
    width = np.dtype(dtype).itemsize
    return _values(data, places, np.full(len(places), width), np.dtype(dtype))


def _values(data: np.ndarray, places: np.ndarray, sizes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the values at places, with a number of bytes at each, one place after the other."""
    if len(places) and ((sizes < 0).any() or int((places + sizes).max()) > len(data)):
        raise ValueError("ends before its content does")
    starts = np.repeat(places - np.cumsum(sizes) + sizes, sizes)
    values: np.ndarray = data[starts + np.arange(len(starts))].view(dtype)
    return values


def _read_part(part: FilePart, fields: Fields) -> Iterator[Records]:
    read = partial(read_mds, most_bytes=part.source.max_record_bytes)
    return read_by(read, part, fields)


MDS = Format(
    name="mds",
    endings=(".mds",),
    read=_read_part,
    damage=(Exception,),
    is_compressible=True,
)
