"""Shards of mosaicml-streaming, `.mds`, plain or compressed: `.mds.zstd`, `.mds.gz`, `.mds.bz2`.

A shard is the number of samples n, n + 1 offsets of samples, all uint32, and a JSON object with the
columns and their encodings, then the samples. A sample is the sizes of its columns without a fixed
size, as uint32, then the columns. Arrays of one dimension, texts and numbers are read; columns with
other encodings, such as pickled objects and images, are left out.
"""

import contextlib
import hashlib
import io
import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import xxhash

from tokenfeed.tools.corpus.blocks import BlockFile, Blocks
from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.sample_containers import (
    name_of,
    open_container,
    read_index,
    records_of_tables,
    weighed,
)
from tokenfeed.tools.corpus.input_files import MAX_RECORD_BYTES, FilePart
from tokenfeed.tools.corpus.locations import local_copy
from tokenfeed.tools.corpus.records import Fields, Records

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


def read_mds(
    file: BinaryIO, most_bytes: int = MAX_RECORD_BYTES, needed: Container[str] = ()
) -> Iterator[pa.RecordBatch]:
    """Yield the samples of a shard, some at a time.

    Args:
        file: The shard, decompressed.
        most_bytes: Greatest size of a sample, and of all offsets.
        needed: Names of columns that must be readable if the shard has them.

    Raises:
        ValueError: The shard is damaged, or a needed column has an encoding that is not read.
    """
    opened = open_container(file, most_bytes)
    config = json.loads(opened.head)
    names, encodings = config["column_names"], config["column_encodings"]
    columns = list(zip(names, encodings, config["column_sizes"], strict=True))
    for name, encoding, _ in columns:
        kind = encoding.partition(":")[0]
        if name in needed and kind not in ("ndarray", "str", *_NUMBERS):
            raise ValueError(
                f"column {name!r} has the encoding {encoding[:40]!r}. Write it as `ndarray`, `str` "
                "or a number"
            )
    for data, offsets in opened.samples:
        yield samples_table(data, offsets, columns)


Column = tuple[str, str | np.dtype, int | None]
"""The name of a column, its encoding or the dtype of its arrays, and its size if that is fixed."""


def samples_table(
    data: np.ndarray, offsets: np.ndarray, columns: Sequence[Column]
) -> pa.RecordBatch:
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
    return pa.record_batch(table)


def _column(
    data: np.ndarray, encoding: str | np.dtype, places: np.ndarray, sizes: np.ndarray
) -> pa.Array | None:
    """Return the values of a column; None if they are not read."""
    if isinstance(encoding, np.dtype):
        return plain_arrays(data, places, sizes, encoding)
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
    return plain_arrays(data, places, sizes, dtype)


def plain_arrays(
    data: np.ndarray, places: np.ndarray, sizes: np.ndarray, dtype: np.dtype
) -> pa.Array:
    """Return a column of arrays, given the first byte and the bytes of each."""
    if (sizes % dtype.itemsize).any():
        raise ValueError("an array ends within a value")
    values = pa.array(_values(data, places, sizes, dtype))
    ends = pa.array(np.append(0, np.cumsum(sizes) // dtype.itemsize), pa.int32())
    return pa.ListArray.from_arrays(ends, values)


def _numbers(data: np.ndarray, places: np.ndarray, dtype: str) -> np.ndarray:
    """Return the number at each place."""
    width = np.dtype(dtype).itemsize
    return _values(data, places, np.full(len(places), width), np.dtype(dtype))


def _values(data: np.ndarray, places: np.ndarray, sizes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the values at places, with a number of bytes at each, one place after the other."""
    if len(places) and ((sizes < 0).any() or int((places + sizes).max()) > len(data)):
        raise ValueError("ends before its content does")
    ends = np.cumsum(sizes)
    if len(places) and (places - places[0] == ends - sizes).all():  # one behind the other
        return data[places[0] : places[0] + ends[-1]].copy().view(dtype)
    starts = np.repeat(places - ends + sizes, sizes)
    values: np.ndarray = data[starts + np.arange(len(starts))].view(dtype)
    return values


def _read_part(part: FilePart, fields: Fields) -> Iterator[Records]:
    """Read a shard. If an index beside it lists checksums, they are compared first.

    Raises:
        ValueError: The shard is damaged.
    """
    listed = _listed(part)
    hashes = listed.get("hashes") or {}
    with local_copy(part.source.path) if hashes else contextlib.nullcontext() as path:
        if path:
            part = replace(part, source=replace(part.source, path=path))
        if listed.get("bytes", part.source.bytes) != part.source.bytes:
            raise ValueError("has another size than index.json says")
        for name, expected in hashes.items():
            is_xxhash = name in xxhash.algorithms_available
            digest = getattr(xxhash, name)() if is_xxhash else hashlib.new(name)
            for block in Blocks(part.source.path):
                digest.update(block)
            if digest.hexdigest() != expected:
                raise ValueError(f"has another checksum {name} than index.json says")
        blocks = part.blocks()
        file = io.BufferedReader(BlockFile(blocks))
        tables = read_mds(file, part.source.max_record_bytes, fields)
        yield from weighed(records_of_tables(tables, part, fields), part, blocks)


def _listed(part: FilePart) -> dict[str, Any]:
    """Return what an index beside a shard says about the file; empty if there is no such index."""
    name = name_of(part.source.path)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        for shard in (read_index(part) or {})["shards"]:
            for listed in (shard["raw_data"], shard["zip_data"]):
                if listed and listed["basename"] == name:
                    return dict(listed)
    return {}


MDS = Format(
    name="mds",
    endings=(".mds",),
    read=_read_part,
    damage=(Exception,),
    is_compressible=True,
)
