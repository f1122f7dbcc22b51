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
"""Stands for the seal, in as many bytes, until all record batches are written."""
_SCHEMA_BYTES = 1 << 16  # more than the schema at the beginning of a file takes


def shard_metadata(name: str, vocabulary_size: int) -> dict[bytes, bytes]:
    """The metadata of a shard's schema, beside the seal."""
    return {
        _VERSION_KEY: str(FORMAT_VERSION).encode(),
        _NAME_KEY: name.encode(),
        _VOCABULARY_KEY: str(vocabulary_size).encode(),
    }


def batch_checksums(
    shard: str, batch_index: int, first_row: int, buffers: dict[str, np.ndarray]
) -> dict[bytes, bytes]:
    """Metadata key and xxh3-64 of each column of a batch, over the decoded buffers and their place.

    The place is shard, column, index, first row and number of rows: a footer that points at another
    good batch is caught as well. Every column is hashed with the row offsets.
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
    """Put the seal into both schemas of a written shard, whose footer begins after `footer`.

    Arrow writes the schema before the first record batch, when the seal cannot be known.
    """
    for start, size in ((0, _SCHEMA_BYTES), (footer, -1)):
        file.seek(start)
        file.seek(start + file.read(size).index(UNSEALED.encode()))
        file.write(seal.encode())


UNDECODABLE = (OSError, MemoryError, ValueError, KeyError, TypeError, pa.ArrowException)
"""What Arrow and numpy raise over bytes that are no record batch."""


@dataclass(frozen=True, slots=True)
class ExpectedShard:
    """One shard as its manifest has it."""

    path: str
    """The file as a message names it."""
    info: ShardInfo
    vocabulary_size: int
    kept: list[int]
    """The columns to read, by their places in the schema."""
    schema: pa.Schema
    """Of these columns."""
    whole_schema: pa.Schema
    """Of all columns."""
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
        """A shard of a data set with these columns, of which `only` some are read; None for all."""
        schema = shard_schema(vocabulary_size, columns)
        kept = [n for n, name in enumerate(schema.names) if only is None or name in only]
        read = pa.schema([schema.field(n) for n in kept])
        return cls(path, info, vocabulary_size, kept, read, schema, column_kinds(read))

    def check(self, stored: pa.Schema, num_batches: int) -> None:
        """Refuse a shard of another name, vocabulary or columns; then one of other rows.

        Raises:
            ShardFormatError: It is not the one that is meant.
        """
        metadata = stored.metadata or {}
        seal = metadata.pop(SEAL_KEY, None)
        implied = shard_metadata(self.info.file, self.vocabulary_size)
        if metadata != implied or not stored.equals(self.schema):
            raise damaged(self.path, "its schema is not the one the manifest implies")
        if seal != (self.info.seal and self.info.seal.encode()):
            raise ShardFormatError(
                f"{self.path}: holds other rows than the shard that the manifest names: it is of "
                "another data set or of another run. Copy the one that belongs to the manifest."
            )
        if num_batches != self.info.batches:
            what = f"expected {self.info.batches} record batches, got {num_batches}"
            raise damaged(self.path, what)

    def rows(
        self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes], batch_index: int
    ) -> tuple[Rows, int]:
        """The rows of a record batch, and the number of the first of them within the shard.

        Raises:
            ShardFormatError: Its checksum differs, or there is no sense in it.
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
        """The error for a record batch of which nothing can be made."""
        return refused(self.path, f"record batch {batch_index} cannot be decoded", cause)
