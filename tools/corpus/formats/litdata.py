"""Chunks of litData, `chunk-*.bin`, plain or compressed as a whole by zstd.

A chunk is a container of samples. `index.json` in the same folder has the types of the columns.
There are no checksums: borders of rows that contradict the sizes are found, and changed ids are
not.
"""

import io
import json
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import zstandard

from tokenfeed.tools.corpus.blocks import BlockFile, Blocks
from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.sample_containers import (
    name_of,
    open_container,
    read_index,
    records_of_tables,
    weighed,
)
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.locations import open_location
from tokenfeed.tools.corpus.records import Fields, Records

_ZSTD, _FRAMES = b"\x28\xb5\x2f\xfd", b"LDFZ"
_TORCH: dict[int, str] = {
    0: "<f4",
    1: "<f4",
    2: "<f8",
    3: "<f8",
    11: "u1",
    12: "i1",
    13: "<i2",
    14: "<i2",
    15: "<i4",
    16: "<i4",
    17: "<i8",
    18: "<i8",
    19: "u1",
    20: "<u2",
}
_NUMPY = ("i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
"""dtype by the number in `no_header_tensor:N` and `no_header_numpy:N` of litData."""


class _Leaf(NamedTuple):
    """A column of the samples."""

    name: str
    dtype: np.dtype | None
    """None: the column is not read."""


def _leaves(config: dict[str, Any]) -> list[_Leaf]:
    """Return the columns of a folder, in the order of the bytes.

    Raises:
        ValueError: A setting of the folder is not supported.
    """
    formats, spec = config["data_format"], json.loads(config["data_spec"] or "[1, {}]")[1]
    context = spec.get("context")
    names = json.loads(context) if isinstance(context, str) else context
    if len(formats) == 1 and not names:
        names = ["input_ids"]
    if config.get("encryption") or config.get("ipc_compression") or config.get("compression_level"):
        raise ValueError(
            "index.json: reads no encryption and no compression inside of chunks. Write the chunks "
            'with compression_level="chunk", or without compression'
        )
    if not isinstance(names, list) or len(names) != len(formats):
        raise ValueError("index.json: expected samples that are an array or a dict of arrays")
    dtypes = []
    for each in formats:
        kind, _, number = each.partition(":")
        of_kind: Any = {"no_header_tensor": _TORCH, "no_header_numpy": dict(enumerate(_NUMPY))}
        code = of_kind.get(kind, {}).get(int(number or -1))
        dtypes.append(code and np.dtype(code))
    return [_Leaf(str(name), dtype) for name, dtype in zip(names, dtypes, strict=True)]


def _read(part: FilePart, fields: Fields) -> Iterator[Records]:
    place = part.source.path
    index = read_index(part)
    if index is None:
        raise ValueError("index.json is missing beside it")
    leaves = _leaves(index["config"])
    (chunk,) = (each for each in index["chunks"] if each["filename"] == name_of(place))
    with open_location(place) as file:
        is_packed = file.read(len(_ZSTD)) == _ZSTD
    blocks = Blocks(place, "zst" if is_packed else None)
    opened = open_container(io.BufferedReader(BlockFile(blocks)), part.source.max_record_bytes)
    offsets = opened.offsets
    if (len(offsets) - 1, offsets[-1]) != (chunk["chunk_size"], chunk["chunk_bytes"]):
        raise ValueError("has another size, or another number of samples, than index.json says")
    has_sizes = index["config"].get("item_loader") != "TokensLoader"
    tables = (_table(*some, leaves, has_sizes=has_sizes) for some in opened.samples)
    yield from weighed(records_of_tables(tables, part, fields), part, blocks)


def _table(
    data: np.ndarray, offsets: np.ndarray, leaves: list[_Leaf], *, has_sizes: bool
) -> pa.RecordBatch:
    """Decode samples. A sample is the sizes of its leaves as uint32, unless a loader of litData
    needs none, and then the leaves."""
    starts, sizes = offsets[:-1], np.diff(offsets)[:, None]
    if has_sizes:
        heads = starts[:, None] + np.arange(4 * len(leaves))
        if int(heads.max()) >= len(data):
            raise ValueError("ends before its content does")
        sizes, starts = data[heads].view("<u4").astype(np.int64), starts + heads.shape[1]
    if sizes.shape[1] != len(leaves) or (sizes < 0).any():
        raise ValueError("its samples are out of order, or of another kind than index.json says")
    if (starts + sizes.sum(1) != offsets[1:]).any():
        raise ValueError("the columns of a sample do not fill it")
    columns: dict[str, pa.ListArray] = {}
    for (name, dtype), num_bytes in zip(leaves, sizes.T, strict=True):
        if dtype is not None:
            if (num_bytes % dtype.itemsize).any():
                raise ValueError(f"column {name!r} ends within a value")
            ends, first = np.cumsum(num_bytes), int(starts[0])
            places: np.ndarray | slice = slice(first, first + int(ends[-1]))
            if (starts[1:] != (starts + num_bytes)[:-1]).any():  # not one behind the other
                places = np.repeat(starts - ends + num_bytes, num_bytes) + np.arange(ends[-1])
            borders = pa.array(np.append(0, ends // dtype.itemsize), pa.int32())
            values = pa.array(data[places].copy().view(dtype))
            columns[name] = pa.ListArray.from_arrays(borders, values)
        starts = starts + num_bytes
    return pa.record_batch(columns)


def _is_chunk(beginning: bytes, field: str) -> bool:
    """Return whether a file begins like a chunk: the number n of its samples, and the end of n + 2
    such numbers. Chunks with compression inside are found too, to be rejected."""
    if beginning.startswith(_FRAMES):
        return True
    if beginning.startswith(_ZSTD):
        with suppress(zstandard.ZstdError):
            beginning = zstandard.ZstdDecompressor().stream_reader(beginning).read(8)
    count, first = struct.unpack("<II", beginning[:8].ljust(8, b"\0"))
    return bool(count and first == 4 * (count + 2))


LITDATA = Format(
    name="litdata",
    endings=(".bin",),
    read=_read,
    damage=(Exception,),
    begins=_is_chunk,
    is_vague=True,
)
