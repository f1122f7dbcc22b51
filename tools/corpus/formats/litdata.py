"""Chunks of litData, `chunk-*.bin`, plain or compressed as a whole by zstd.

A chunk is a container of samples. `index.json` in the same folder has the types of the columns.
There are no checksums: borders of rows that contradict the sizes are found, and changed ids are
not.
"""

import io
import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard

from tokenfeed.tools.corpus.blocks import BlockFile, Blocks
from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.mds import Column, plain_arrays, samples_table
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


def _columns(config: dict[str, Any]) -> list[Column]:
    """Return the columns of a folder, in the order of the bytes. Other types are skipped.

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
    columns: list[Column] = []
    for name, each in zip(names, formats, strict=True):
        kind, _, number = each.partition(":")
        of_kind: Any = {"no_header_tensor": _TORCH, "no_header_numpy": dict(enumerate(_NUMPY))}
        code = of_kind.get(kind, {}).get(int(number or -1))
        columns.append((str(name), np.dtype(code) if code else "", None))
    return columns


def _read(part: FilePart, fields: Fields) -> Iterator[Records]:
    place = part.source.path
    index = read_index(part)
    if index is None:
        raise ValueError("index.json is missing beside it")
    columns = _columns(index["config"])
    (chunk,) = (each for each in index["chunks"] if each["filename"] == name_of(place))
    with open_location(place) as file:
        is_packed = file.read(len(_ZSTD)) == _ZSTD
    blocks = Blocks(place, "zst" if is_packed else None)
    opened = open_container(io.BufferedReader(BlockFile(blocks)), part.source.max_record_bytes)
    offsets = opened.offsets
    if (len(offsets) - 1, offsets[-1]) != (chunk["chunk_size"], chunk["chunk_bytes"]):
        raise ValueError("has another size, or another number of samples, than index.json says")
    has_sizes = index["config"].get("item_loader") != "TokensLoader"
    read = samples_table if has_sizes else _without_sizes
    tables = (read(*some, columns) for some in opened.samples)
    yield from weighed(records_of_tables(tables, part, fields), part, blocks)


def _without_sizes(
    data: np.ndarray, offsets: np.ndarray, columns: Sequence[Column]
) -> pa.RecordBatch:
    """Decode samples of a loader that needs no sizes: each is its only array."""
    ((name, dtype, _),) = columns
    if not isinstance(dtype, np.dtype):
        return pa.record_batch({})
    return pa.record_batch({name: plain_arrays(data, offsets[:-1], np.diff(offsets), dtype)})


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
