"""Verify that a shard and its record batches are those that the manifest describes.

Every column of a record batch has a checksum. The seal is a checksum over all of these; it is in
the manifest and in the schema of the shard. Opening a shard reads the schema anyway, so a shard
with other rows is rejected before any row is read, at no extra cost. The content of a record batch
is hashed and compared when it is decoded. All ways of reading a shard use `ExpectedShard`.
Torch-free.
"""

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import IO, Self

import numpy as np
import pyarrow as pa
import xxhash

from tokenfeed.pipeline.errors import ShardFormatError
from tokenfeed.pipeline.format.manifest import ShardInfo
from tokenfeed.pipeline.format.read_errors import damaged, refused
from tokenfeed.pipeline.format.rows import Kinds, Rows, batch_buffers, column_kinds, rows_of_buffers
from tokenfeed.pipeline.format.schema import FORMAT_VERSION, Column, shard_schema

__all__ = [
    "FIRST_ROW_KEY",
    "SEAL_KEY",
    "UNDECODABLE",
    "UNSEALED",
    "ExpectedShard",
    "batch_checksums",
    "set_seal",
    "shard_metadata",
]

FIRST_ROW_KEY, SEAL_KEY = b"first_row", b"tokenfeed.seal"
_VERSION_KEY, _NAME_KEY, _VOCABULARY_KEY = (
    b"tokenfeed.format_version",
    b"tokenfeed.shard",
    b"tokenfeed.vocabulary_size",
)
_CHECKSUM_KEY = "xxh3."

UNSEALED = "(not yet sealed)"
"""Placeholder of the same length for the seal, until all record batches are written."""
_SCHEMA_BYTES = 1 << 16  # more than the size of the schema at the beginning of a file


def shard_metadata(name: str, vocabulary_size: int) -> dict[bytes, bytes]:
    """Return the metadata of a shard's schema, without the seal."""
    return {
        _VERSION_KEY: str(FORMAT_VERSION).encode(),
        _NAME_KEY: name.encode(),
        _VOCABULARY_KEY: str(vocabulary_size).encode(),
    }


def batch_checksums(
    shard: str, batch_index: int, first_row: int, buffers: dict[str, np.ndarray]
) -> dict[bytes, bytes]:
    """Return metadata key and xxh3-64 of each column of a record batch.

    The hash covers the decoded values, the row offsets, and the place: shard, column, batch index,
    first row and number of rows. So a footer that points at another valid batch is detected too.
    """
    offsets = buffers[""]
    place = struct.pack("<3Q", batch_index, first_row, len(offsets) - 1)
    checksums = {}
    for name, values in buffers.items():
        if name:
            digest = xxhash.xxh3_64(f"{shard}/{name}".encode() + place)
            digest.update(offsets.data)
            digest.update(values.data)
            checksums[f"{_CHECKSUM_KEY}{name}".encode()] = digest.hexdigest().encode()
    return checksums


def set_seal(file: IO[bytes], footer: int, seal: str) -> None:
    """Write the seal into both schemas of a shard. The footer begins after byte `footer`.

    Arrow writes the schema before the record batches, so the seal is not known then.
    """
    for start, size in ((0, _SCHEMA_BYTES), (footer, -1)):
        file.seek(start)
        file.seek(start + file.read(size).index(UNSEALED.encode()))
        file.write(seal.encode())


UNDECODABLE = (OSError, MemoryError, ValueError, KeyError, TypeError, pa.ArrowException)
"""Errors of Arrow and numpy for bytes that are not a valid record batch."""


@dataclass(frozen=True, slots=True)
class ExpectedShard:
    """What the manifest says about a shard."""

    path: str
    """The path of the file, for messages."""
    info: ShardInfo
    vocabulary_size: int
    kept: list[int]
    """Indices of the columns to read."""
    schema: pa.Schema
    """Schema of the columns to read."""
    whole_schema: pa.Schema
    """Schema of all columns."""
    kinds: Kinds

    @classmethod
    def of(
        cls,
        path: str,
        info: ShardInfo,
        vocabulary_size: int,
        columns: tuple[Column, ...],
        only: Collection[str] | None,
    ) -> Self:
        """Return the expectations for a shard. `only` names the columns to read; None for all."""
        schema = shard_schema(vocabulary_size, columns)
        kept = [n for n, name in enumerate(schema.names) if only is None or name in only]
        read = pa.schema([schema.field(n) for n in kept])
        return cls(path, info, vocabulary_size, kept, read, schema, column_kinds(read))

    def check(self, stored: pa.Schema, num_batches: int) -> None:
        """Compare the schema, the seal and the number of record batches of a shard.

        Raises:
            ShardFormatError: The shard is not the one of the manifest.
        """
        metadata = stored.metadata or {}
        seal = metadata.pop(SEAL_KEY, None)
        implied = shard_metadata(self.info.file, self.vocabulary_size)
        if metadata != implied or not stored.equals(self.schema):
            raise damaged(self.path, "its schema is not the one the manifest implies")
        if seal != (self.info.seal and self.info.seal.encode()):
            raise ShardFormatError(
                f"{self.path}: holds other rows than the shard that the manifest names: it comes "
                "from another data set or run. Copy the shard that belongs to the manifest."
            )
        if num_batches != self.info.batches:
            what = f"expected {self.info.batches} record batches, got {num_batches}"
            raise damaged(self.path, what)

    def rows(
        self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes], batch_index: int
    ) -> tuple[Rows, int]:
        """Return the rows of a record batch, and the number of its first row in the shard.

        Raises:
            ShardFormatError: A checksum differs, or the batch cannot be decoded.
        """
        try:
            buffers = batch_buffers(batch, self.kinds)
            first_row, stored = int(metadata[FIRST_ROW_KEY]), dict(metadata.items())
        except UNDECODABLE as error:
            raise self.undecodable(batch_index, error) from error
        actual = batch_checksums(self.info.file, batch_index, first_row, buffers)
        if not actual.items() <= stored.items():
            raise damaged(self.path, f"record batch {batch_index} fails its checksum")
        return rows_of_buffers(buffers, self.kinds), first_row

    def undecodable(self, batch_index: int, cause: Exception) -> ShardFormatError:
        """Return the error for a record batch that cannot be decoded."""
        return refused(self.path, f"record batch {batch_index} cannot be decoded", cause)
