"""A partition: the rows that one unit scatters, a section for each bucket, in one temporary file.

The sections stand in the order of the buckets, each with its columns one after the other,
compressed; behind them a table says where each begins, how much is in it and what its checksum is.
So a bucket's section is found and read by two short reads, however many there are, and wrong bytes
never become rows. Nothing here is synced: what a power cut takes, the file's checksum in the
journal tells, and it is made again.
"""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import xxhash

from tokenfeed.pipeline.errors import ShardFormatError
from tokenfeed.pipeline.format.manifest import FileInfo
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.storage import atomic_file

__all__ = ["TABLE_BYTES", "Columns", "Placed", "read_section", "write_partition"]

_ENTRY = struct.Struct("<5Q")
"""Where a section begins, its bytes, rows and tokens, and a checksum over these and its content."""
TABLE_BYTES = _ENTRY.size
"""What the table of a partition takes for each section."""
_CODEC = pa.Codec("lz4_raw")
_LENGTH, _PLACE = ("length", "row"), ("place", "row")
"""What a section has beside the columns of the data set."""

Key = tuple[str, str]
"""Name of a column, and whether it has a value a `token` or a `row`."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Rows, and where in their bucket they belong."""

    rows: Rows
    places: np.ndarray
    """Shape (R,); of a whole bucket the numbers from 0 to R - 1 in some order."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What a section holds of each row and token, the widest first, so that all are aligned."""

    dtypes: dict[Key, np.dtype[Any]]

    @classmethod
    def from_schema(cls, schema: pa.Schema) -> Self:
        """Those of a shard's schema, and two for the row's length and place."""
        dtypes = {_LENGTH: np.dtype(np.uint32), _PLACE: np.dtype(np.uint32)}
        for field in schema:
            is_list = pa.types.is_list(field.type)
            kind = field.type.value_type if is_list else field.type
            key = field.name, "token" if is_list else "row"
            dtypes[key] = np.dtype(kind.to_pandas_dtype())
        return cls(dict(sorted(dtypes.items(), key=lambda item: -item[1].itemsize)))

    def content(self, placed: Placed) -> list[memoryview]:
        """Every column of some rows, as it is written."""
        rows = placed.rows
        values = {_LENGTH: rows.lengths, _PLACE: placed.places}
        values |= {(name, "row"): column for name, column in rows.per_row.items()}
        values |= {(name, "token"): column for name, column in rows.per_token.items()}
        return [values[key].astype(dtype, copy=False).data for key, dtype in self.dtypes.items()]

    def placed(self, content: Any, num_rows: int, num_tokens: int) -> Placed:
        """The rows that a section's content is, over its memory."""
        values, at = {}, 0
        for key, dtype in self.dtypes.items():
            count = num_rows if key[1] == "row" else num_tokens
            values[key] = np.frombuffer(content, dtype, count, at)
            at += values[key].nbytes
        lengths, places = values.pop(_LENGTH).astype(np.int64), values.pop(_PLACE)
        per_token = {name: column for (name, per), column in values.items() if per == "token"}
        per_row = {name: column for (name, per), column in values.items() if per == "row"}
        return Placed(Rows(lengths, per_token, per_row), places)

    def num_bytes(self, num_rows: int, num_tokens: int) -> int:
        """The size of a section's content."""
        counts = {"row": num_rows, "token": num_tokens}
        return sum(dtype.itemsize * counts[per] for (_, per), dtype in self.dtypes.items())


def write_partition(
    folder: Path, name: str, sections: Iterable[Placed], columns: Columns, *, compressed: bool
) -> FileInfo:
    """Write a partition.

    Args:
        folder: What `name` is below.
        name: The file.
        sections: The rows of each bucket.
        columns: Those of the rows.
        compressed: Whether its sections are to be small, or cheap to make.
    """
    digest, table, at = xxhash.xxh3_64(), bytearray(), 0
    with atomic_file(folder / name, synced=False) as file:
        for bucket, placed in enumerate(sections):
            content = columns.content(placed)
            if compressed:
                content = _compressed(content)
            counts = len(placed.rows), len(placed.rows.ids)
            num_bytes = sum(part.nbytes for part in content)
            table += _ENTRY.pack(at, num_bytes, *counts, _checksum(bucket, *counts, content))
            for part in content:
                digest.update(part)
                file.write(part)
            at += num_bytes
        digest.update(table)
        file.write(table)
    return FileInfo(file=name, bytes=at + len(table), xxh3=digest.hexdigest())


def read_section(path: Path, bucket: int, num_buckets: int, columns: Columns) -> Placed:
    """The rows of one bucket that a partition has.

    Raises:
        ShardFormatError: They are not as they were written.
    """
    with open(path, "rb", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size - _ENTRY.size * (num_buckets - bucket)
        entry = os.pread(file.fileno(), _ENTRY.size, max(end, 0))
        if len(entry) < _ENTRY.size:
            raise _damaged(path)
        at, num_bytes, num_rows, num_tokens, checksum = _ENTRY.unpack(entry)
        if at + num_bytes > end:  # the figures of a damaged table may be anything
            raise _damaged(path)
        section = os.pread(file.fileno(), num_bytes, at)
    if _checksum(bucket, num_rows, num_tokens, [memoryview(section)]) != checksum:
        raise _damaged(path)
    size = columns.num_bytes(num_rows, num_tokens)
    if num_bytes < size:
        section = _CODEC.decompress(section, decompressed_size=size)
    return columns.placed(section, num_rows, num_tokens)


def _compressed(content: list[memoryview]) -> list[memoryview]:
    """A section's content in one smaller piece, if it can be one: its size tells which it is."""
    whole = b"".join(content)
    section = _CODEC.compress(whole, asbytes=True) if whole else b""
    return [memoryview(section)] if len(section) < len(whole) else content


def _checksum(bucket: int, num_rows: int, num_tokens: int, content: list[memoryview]) -> int:
    digest = xxhash.xxh3_64(struct.pack("<3Q", bucket, num_rows, num_tokens))
    for part in content:
        digest.update(part)
    return digest.intdigest()


def _damaged(path: Path) -> ShardFormatError:
    return ShardFormatError(
        f"{path}: this temporary file is damaged. Repeat the command, which makes it again."
    )
