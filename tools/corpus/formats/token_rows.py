"""Rows of token ids in the files of datatrove (`.ds`) and litData (`chunk-*.bin`).

Each format has an index in a second file, in the same folder or bucket. Neither format has
checksums: borders of rows that contradict the size of a file are found, and changed ids are not.
"""

import json
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import zstandard

from tokenfeed.tools.corpus.blocks import Blocks
from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.tables import BATCH_ROWS, batch_records, column_problem
from tokenfeed.tools.corpus.input_files import FilePart, InputFile, whole
from tokenfeed.tools.corpus.locations import Location, open_location
from tokenfeed.tools.corpus.records import Fields, Records, rejected

_BATCH_TOKENS, _BATCH_BYTES = 1 << 20, 1 << 22
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


def _beside(place: Location, name: str) -> Location:
    """Return the place of a file, by its name in the folder of another.

    Raises:
        ValueError: The folder lacks the file.
    """
    if isinstance(place, str):
        path = f"{place.rpartition('/')[0]}/{name}"
        if not os.path.exists(path):
            raise ValueError(f"{name} is missing beside it")
        return path
    folder = place.info.name.rpartition("/")[0]
    key = f"{folder}/{name}" if folder else name
    return replace(place, info=place.store.head(key), pinned="", content=None)


def _name(place: Location) -> str:
    return (place if isinstance(place, str) else place.info.name).rpartition("/")[2]


def _records(
    columns: dict[str, pa.ListArray], fields: Fields, first: int, weight_bytes: float
) -> Iterator[Records]:
    """Yield rows as records, the first of them number `first`."""
    table = pa.record_batch(columns)
    for start in range(0, len(table), BATCH_ROWS):
        rows = table.slice(start, BATCH_ROWS)
        numbers = np.arange(first + start, first + start + len(rows), dtype=np.uint64)
        weight = weight_bytes * len(rows) / len(table)
        yield replace(batch_records(rows, fields, numbers), weight_bytes=weight)


def _lists(values: np.ndarray, ends: np.ndarray) -> pa.ListArray:
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _array(place: Location, dtype: str, start: int, stop: int | None) -> np.ndarray:
    """Return the values `start` to `stop` of a file.

    Raises:
        ValueError: The file is shorter, or ends within a value.
    """
    width = np.dtype(dtype).itemsize
    with open_location(place) as file:
        file.seek(start * width)
        left = None if stop is None else (stop - start) * width
        content = bytearray()
        while left != 0 and (piece := file.read(-1 if left is None else left)):
            content += piece
            left = None if left is None else left - len(piece)
    if left:
        raise ValueError(f"{place} is cut short")
    return np.frombuffer(content, dtype)


def _width(source: InputFile) -> int:
    """Return the bytes of an id, which `.ds.metadata` has behind the name of the tokenizer."""
    name = f"{_name(source.path)}.metadata"
    with open_location(_beside(source.path, name)) as file:
        width = file.read(1 << 16).split(b"\n")[0].strip().rpartition(b"|")[2]
    if width not in (b"2", b"4"):
        raise ValueError(f"{name}: names ids of {width!r} bytes, expected 2 or 4")
    return int(width)


def _ends(source: InputFile, start: int, stop: int | None) -> np.ndarray:
    """Return the ends of the rows `start` to `stop`, after the end of the row before, in ids.

    Raises:
        ValueError: The rows are out of order, or end behind the file.
    """
    name = f"{_name(source.path)}.index"
    ends = _array(_beside(source.path, name), "<u8", max(start - 1, 0), stop).astype(np.int64)
    ends = ends if start else np.concatenate([[0], ends])
    is_last = stop is None
    size, rest = divmod(source.bytes, _width(source))
    if rest or (np.diff(ends) < 0).any() or ends[-1] > size or (is_last and ends[-1] != size):
        raise ValueError(f"{name}: its rows are out of order, or do not fill the file of ids")
    return ends


def _cut_datatrove(source: InputFile, shard_bytes: int) -> Iterator[FilePart]:
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


def _read_datatrove(part: FilePart, fields: Fields) -> Iterator[Records]:
    schema = pa.schema({"input_ids": pa.list_(pa.uint32())})
    if problem := column_problem(schema, fields):
        if not part.start:
            yield rejected(part.first_record, fields, problem)
        return
    source, row = part.source, part.start
    dtype, ends = f"<u{_width(source)}", _ends(part.source, part.start, part.stop)
    total = max(int(ends[-1] - ends[0]), 1)
    while len(ends) > 1:
        count = max(int(np.searchsorted(ends, ends[0] + _BATCH_TOKENS)), 1)
        some, ends = ends[: count + 1], ends[count:]
        ids = _array(source.path, dtype, int(some[0]), int(some[-1]))
        columns = {"input_ids": _lists(ids, some[1:] - some[0])}
        yield from _records(columns, fields, row, part.weight_bytes * len(ids) / total)
        row += count


class _Leaf(NamedTuple):
    """A column of litData's samples."""

    name: str
    dtype: np.dtype | None
    """None: the column is not read."""


def _leaves(config: dict[str, Any]) -> list[_Leaf]:
    """Return the columns of a folder of litData, in the order of the bytes.

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


def _read_litdata(part: FilePart, fields: Fields) -> Iterator[Records]:
    place = part.source.path
    index = json.loads(_array(_beside(place, "index.json"), "u1", 0, None).tobytes())
    leaves = _leaves(index["config"])
    known = {leaf.name: pa.list_(pa.from_numpy_dtype(leaf.dtype)) for leaf in leaves if leaf.dtype}
    if problem := column_problem(pa.schema(known), fields):
        yield rejected(part.first_record, fields, problem)
        return
    (chunk,) = (each for each in index["chunks"] if each["filename"] == _name(place))
    data, count = _unpacked(place, int(chunk["chunk_bytes"])), int(chunk["chunk_size"])
    offsets = data[: 8 + 4 * count].view("<u4").astype(np.int64)[1:]
    is_whole = len(offsets) == count + 1 and offsets[0] == 8 + 4 * count
    if not is_whole or data[:4].view("<u4")[0] != count or offsets[-1] != len(data):
        raise ValueError("its samples do not fill it, or are not as many as index.json says")
    has_sizes, start = index["config"].get("item_loader") != "TokensLoader", 0
    while start < count:
        stop = int(np.searchsorted(offsets, offsets[start] + _BATCH_BYTES))
        stop = min(max(stop, start + 1), count)
        columns = _columns(data, offsets[start : stop + 1], leaves, has_sizes=has_sizes)
        weight = part.weight_bytes * (stop - start) / count
        yield from _records(columns, fields, part.first_record + start, weight)
        start = stop


def _unpacked(place: Location, num_bytes: int) -> np.ndarray:
    """Return the bytes of a chunk without its compression.

    Raises:
        ValueError: They are not as many as index.json says.
    """
    with open_location(place) as file:
        is_packed = file.read(len(_ZSTD)) == _ZSTD
    content = bytearray()
    for block in Blocks(place, "zst" if is_packed else None):
        content += block
        if len(content) > num_bytes:
            break
    if len(content) != num_bytes:
        raise ValueError("has another size than index.json says")
    return np.frombuffer(content, np.uint8)


def _columns(
    data: np.ndarray, offsets: np.ndarray, leaves: list[_Leaf], *, has_sizes: bool
) -> dict[str, pa.ListArray]:
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
            columns[name] = _lists(data[places].copy().view(dtype), ends // dtype.itemsize)
        starts = starts + num_bytes
    return columns


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


DATATROVE = Format(name="datatrove", endings=(".ds",), read=_read_datatrove, cut=_cut_datatrove)
LITDATA = Format(
    name="litdata",
    endings=(".bin",),
    read=_read_litdata,
    damage=(Exception,),
    begins=_is_chunk,
    is_vague=True,
)
