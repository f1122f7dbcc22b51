"""Samples of other projects: mosaicml-streaming, litData and datatrove.

A shard of mosaicml-streaming (`.mds`, plain or compressed: `.mds.zstd`, `.mds.gz`, `.mds.bz2`) and
a chunk of litData (`chunk-*.bin`, plain or compressed as a whole by zstd) are containers: the
number n of samples and n + 1 offsets of samples, all uint32, then a head, then the samples. A
container is read in order, some samples at a time, because a small compressed file may claim
gigabytes.

The head of a shard is a JSON object with the columns and their encodings. A sample is the sizes of
its columns without a fixed size, as uint32, then the columns. Arrays of one dimension, texts and
numbers are read; columns with other encodings, such as pickled objects and images, are left out.

litData has the types of the columns in `index.json`, in the same folder. datatrove has rows of
token ids in `.ds`, with an index and a width beside them. Both have no checksums: borders of rows
that contradict the sizes are found, and changed ids are not.
"""

import contextlib
import hashlib
import io
import json
import os
import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import pyarrow as pa
import xxhash
import zstandard

from tokenfeed.tools.corpus.blocks import BlockFile, Blocks
from tokenfeed.tools.corpus.formats.tables import (
    BATCH_ROWS,
    batch_records,
    column_problem,
    without_long,
)
from tokenfeed.tools.corpus.input_files import MAX_RECORD_BYTES, FilePart, Format, InputFile, whole
from tokenfeed.tools.corpus.locations import (
    Location,
    beside,
    local_copy,
    open_location,
    read_array,
    size_of,
)
from tokenfeed.tools.corpus.records import Fields, Records, rejected, too_long

CHUNK_BYTES = 4 << 20


class OpenContainer(NamedTuple):
    """An open container."""

    offsets: np.ndarray
    """The beginning of each sample, and the end, int64."""
    head: bytes
    samples: Iterator[tuple[np.ndarray, np.ndarray]]
    """Some samples at a time: their bytes, and their offsets therein. Raises ValueError if the
    samples do not fill the container."""


def open_container(file: BinaryIO, most_bytes: int) -> OpenContainer:
    """Read the offsets and the head of a container.

    Args:
        file: The container, decompressed.
        most_bytes: Greatest size of a sample, and of all offsets.

    Raises:
        ValueError: The container is damaged.
    """
    read = partial(_read_bytes, file, most_bytes=max(most_bytes, CHUNK_BYTES))
    first = 4 * (int(read(4).view("<u4")[0]) + 2)
    offsets = read(first - 4).view("<u4").astype(np.int64)
    if offsets[0] < first or (np.diff(offsets) < 0).any():
        raise ValueError("the offsets of its samples are not inside the file")
    head = read(int(offsets[0]) - first).tobytes()

    def samples() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        start = 0
        while start < len(offsets) - 1:
            full = np.searchsorted(offsets, offsets[start] + CHUNK_BYTES, "right") - 1
            stop = min(max(int(full), start + 1), len(offsets) - 1)
            some = offsets[start : stop + 1] - offsets[start]
            yield read(int(some[-1])), some
            start = stop
        if file.read(1):
            raise ValueError("the offsets of its samples do not fill the file")

    return OpenContainer(offsets, head, samples())


def _read_bytes(file: BinaryIO, num_bytes: int, *, most_bytes: int) -> np.ndarray:
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


def records_of_tables(
    tables: Iterable[pa.RecordBatch], part: FilePart, fields: Fields
) -> Iterator[Records]:
    """Yield the rows of tables that follow one another. If a column is missing, the file is one
    reject."""
    record = part.first_record
    for table in tables:
        if problem := column_problem(table.schema, fields):
            if not part.start:  # once for the file
                yield rejected(part.first_record, fields, problem)
            return
        for start in range(0, len(table), BATCH_ROWS):
            rows = table.slice(start, BATCH_ROWS)
            numbers = np.arange(record, record + len(rows), dtype=np.uint64)
            records = batch_records(rows, fields, numbers)
            yield without_long(records, fields, part.source.max_record_bytes)
            record += len(rows)


def weighed(records: Iterable[Records], part: FilePart, blocks: Blocks) -> Iterator[Records]:
    """Yield records with their share of the weight of a part, by the bytes read before them."""
    consumed = 0
    for each in records:
        yield replace(each, weight_bytes=part.weight_of(blocks.consumed_bytes - consumed))
        consumed = blocks.consumed_bytes


def name_of(place: Location) -> str:
    """Return the name of a file without its folder."""
    return os.path.basename(place if isinstance(place, str) else place.info.name)


def read_index(part: FilePart) -> dict[str, Any] | None:
    """Return the content of index.json in the folder of a file; None if it is missing.

    Raises:
        ValueError: The index is not JSON.
    """
    place = beside(part.source.path, "index.json")
    if place is None:
        return None
    return cast(dict[str, Any], json.loads(b"".join(Blocks(place))))


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


def _read_mds(part: FilePart, fields: Fields) -> Iterator[Records]:
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
    read=_read_mds,
    damage=(Exception,),
    is_compressible=True,
)


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


def _litdata_columns(config: dict[str, Any]) -> list[Column]:
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


def _read_litdata(part: FilePart, fields: Fields) -> Iterator[Records]:
    place = part.source.path
    index = read_index(part)
    if index is None:
        raise ValueError("index.json is missing beside it")
    columns = _litdata_columns(index["config"])
    (chunk,) = (each for each in index["chunks"] if each["filename"] == name_of(place))
    with open_location(place) as file:
        is_packed = file.read(len(_ZSTD)) == _ZSTD
    blocks = Blocks(place, "zst" if is_packed else None)
    opened = open_container(io.BufferedReader(BlockFile(blocks)), part.source.max_record_bytes)
    offsets = opened.offsets
    if (len(offsets) - 1, offsets[-1]) != (chunk["chunk_size"], chunk["chunk_bytes"]):
        raise ValueError("has another size, or another number of samples, than index.json says")
    if opened.head:
        raise ValueError("the first sample does not follow the offsets")
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
    read=_read_litdata,
    damage=(Exception,),
    begins=_is_chunk,
    is_vague=True,
)


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


DATATROVE = Format(name="datatrove", endings=(".ds",), read=_read_datatrove, cut=_cut_datatrove)
