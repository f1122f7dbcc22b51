"""A shard: one Arrow IPC file whose record batches carry their own checksums.

A record batch (65,536 tokens or a little more, or 16,384 rows) is the unit of reading,
decompression and verification. Each of its columns has a checksum, so other columns need not be
read. When a record batch is decoded, its content is hashed and compared, so wrong bytes never
become tokens. The seal is a checksum over all of these checksums; it is in the manifest and in the
schema of the shard. Opening a shard reads the schema anyway, so a shard with other rows is rejected
before any row is read, at no extra cost. All ways of reading a shard use `ExpectedShard`.

Files are read by `pread`, not by a memory map: truncating a mapped file kills the process (SIGBUS).
docs/format.md is the specification. Torch-free; used by the loader and by `pretokenize`.
"""

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import xxhash
from pyarrow import ipc

from tokenfeed.pipeline.errors import ShardFormatError, damaged, refused
from tokenfeed.pipeline.format.manifest import Manifest, ShardInfo
from tokenfeed.pipeline.format.schema import (
    FORMAT_VERSION,
    ORIGIN_FILE,
    Column,
    Kinds,
    Rows,
    batch_buffers,
    column_kinds,
    rows_of_buffers,
    shard_schema,
)
from tokenfeed.pipeline.format.store import StorePath, open_store

FIRST_ROW_KEY, SEAL_KEY = b"first_row", b"tokenfeed.seal"
_VERSION_KEY, _NAME_KEY, _VOCABULARY_KEY = (
    b"tokenfeed.format_version",
    b"tokenfeed.shard",
    b"tokenfeed.vocabulary_size",
)
_CHECKSUM_KEY = "xxh3."


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
        implied = shard_metadata(self.info.stored_name, self.vocabulary_size)
        if metadata != implied or not stored.equals(self.schema):
            raise damaged(self.path, "its schema is not the one the manifest implies")
        if seal != (self.info.seal and self.info.seal.encode("utf-8", "surrogatepass")):
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
        actual = batch_checksums(self.info.stored_name, batch_index, first_row, buffers)
        if not actual.items() <= stored.items():
            raise damaged(self.path, f"record batch {batch_index} fails its checksum")
        if self.info.first_source and ORIGIN_FILE in buffers:
            buffers[ORIGIN_FILE] = buffers[ORIGIN_FILE] + np.uint32(self.info.first_source)
        return rows_of_buffers(buffers, self.kinds), first_row

    def undecodable(self, batch_index: int, cause: Exception) -> ShardFormatError:
        """Return the error for a record batch that cannot be decoded."""
        return refused(self.path, f"record batch {batch_index} cannot be decoded", cause)


_CHECKED_BYTES = 1 << 20


class ShardReader:
    """Reads record batches of one shard, and verifies each.

    It can be shared between threads, but not between processes.
    """

    def __init__(
        self,
        path: StorePath,
        info: ShardInfo,
        vocabulary_size: int,
        columns: tuple[Column, ...] = (),
        *,
        only: Collection[str] | None = None,
    ) -> None:
        """Open the shard and compare it with the manifest.

        Args:
            path: Path of the data set.
            info: The shard's entry of the manifest.
            vocabulary_size: Vocabulary size of the manifest.
            columns: Columns of the manifest.
            only: Names of the columns to read; None for all.

        Raises:
            ShardFormatError: The shard is missing, unreadable, truncated, not an Arrow file, or
                another shard.
        """
        self._store = open_store(path)
        self._info = info
        self.path = self._store.path(info.file)
        """The path of the file, for messages."""
        self._expected = ExpectedShard.of(self.path, info, vocabulary_size, columns, only)
        self._reader = self._open(self._expected.kept)
        self._expected.check(self._reader.schema, self._reader.num_record_batches)

    @classmethod
    def open(
        cls,
        path: StorePath,
        manifest: Manifest,
        info: ShardInfo,
        *,
        only: Collection[str] | None = None,
    ) -> Self:
        """Open a shard of the data set that `manifest` describes; see the constructor."""
        vocabulary_size = manifest.tokenizer.vocabulary_size
        return cls(path, info, vocabulary_size, manifest.columns, only=only)

    def read(self, batch_index: int) -> tuple[Rows, int]:
        """Decode and check one record batch.

        Returns:
            Its rows (arrays over Arrow's memory, read-only), and the number of its first row
            within the shard.

        Raises:
            ShardFormatError: The batch cannot be read or decoded, or its checksum differs.
        """
        try:
            batch, metadata = self._reader.get_batch_with_custom_metadata(batch_index)
        except UNDECODABLE as error:
            raise self._expected.undecodable(batch_index, error) from error
        return self._expected.rows(batch, metadata, batch_index)

    def verify_file(self) -> None:
        """Compare the whole file's checksum with the manifest's: finds damage between batches."""
        try:
            actual = self._checksum()
        except OSError as error:
            raise refused(self.path, "the file cannot be read", error) from error
        if actual != self._info.xxh3:
            raise damaged(self.path, f"the file has checksum {actual}, expected {self._info.xxh3}")

    def _checksum(self) -> str:
        """Return the xxh3-64 of the whole file, read once, 1 MiB at a time."""
        digest = xxhash.xxh3_64()
        with self._store.open(self._info.file, self._info.bytes) as file:
            while block := file.read(_CHECKED_BYTES):
                digest.update(block)
        return digest.hexdigest()

    def _open(self, kept: list[int]) -> ipc.RecordBatchFileReader:
        """Open the file, to read some of its columns."""
        options = ipc.IpcReadOptions(use_threads=False, included_fields=kept)
        try:
            size = self._store.size(self._info.file)
            if size != self._info.bytes:
                raise ShardFormatError(
                    f"{self.path}: expected {self._info.bytes:,} bytes, got {size:,}: the file was "
                    "cut short or replaced. Copy it again, or run `pretokenize` again."
                )
            return ipc.open_file(self._store.open(self._info.file, size), options=options)
        except FileNotFoundError as error:
            raise ShardFormatError(
                f"{self.path}: not found, but the manifest names it. Copy it again."
            ) from error
        except (OSError, MemoryError, pa.ArrowException) as error:
            raise refused(self.path, "its header or footer cannot be read", error) from error
