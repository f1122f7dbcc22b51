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

import functools
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
import xxhash
from pyarrow import ipc

from tokenfeed.pipeline.errors import ShardFormatError, damaged, refused
from tokenfeed.pipeline.format import arrow_file
from tokenfeed.pipeline.format.manifest import Manifest, ShardInfo
from tokenfeed.pipeline.format.schema import (
    FORMAT_VERSION,
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


UNDECODABLE = (
    *(OSError, MemoryError, ValueError, KeyError, TypeError, OverflowError, pa.ArrowException),
    *arrow_file.UNREADABLE,
)
"""Errors of Arrow and numpy for bytes that are not a valid record batch."""
_REST = 1 << 12
"""More bytes than the rest of a footer: the schema, with names and types of columns. Also the bytes
of a record batch that are read first: its message, and mostly the begins of its buffers."""
_SPARE_BYTES = 64
"""Bytes that Arrow may add to a buffer."""


def end_bytes(info: ShardInfo) -> int:
    """Return the bytes at the end of a shard that usually include its footer; see
    `arrow_file.missing_bytes`."""
    return min(info.bytes, info.batches * arrow_file.BLOCK_BYTES + _REST)


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
    buffers: tuple[int, ...]
    """Numbers of the Arrow buffers of the columns to read."""
    most_bytes: int
    """Bytes of the columns to read of the whole shard, after decompression."""

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
        read = _read_columns(vocabulary_size, columns, None if only is None else tuple(only))
        most = _SPARE_BYTES * len(read.buffers) + sum(
            (info.rows + 1) * _OFFSET_BYTES + info.tokens * dtype.itemsize
            if is_per_token
            else info.rows * dtype.itemsize
            for dtype, is_per_token in read.kinds.values()
        )
        return cls(path, info, vocabulary_size, *read, most)

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
        if seal != (self.info.seal and self.info.seal.encode("utf-8", "surrogatepass")):
            raise ShardFormatError(
                f"{self.path}: holds other rows than the shard that the manifest names: it comes "
                "from another data set or run. Copy the shard that belongs to the manifest."
            )
        if num_batches != self.info.batches:
            what = f"expected {self.info.batches} record batches, got {num_batches}"
            raise damaged(self.path, what)

    def check_size(
        self, message: bytes, body: int | None = None, read: Callable[[int], bytes] | None = None
    ) -> None:
        """Compare what a record batch becomes by decompression with the whole shard's size.

        Args:
            message: The first bytes of the record batch, with the whole message.
            body: Where its buffers begin; by default right after the message.
            read: Returns 8 bytes behind the end of `message`; None if it is the whole batch.

        Raises:
            ValueError: The record batch would be larger than the manifest allows.
        """
        if body is None:
            body = arrow_file.message_bytes(message)
        size = arrow_file.decoded_bytes(message, body, self.buffers, read)
        if size > self.most_bytes:
            raise ValueError(
                f"it would take {size:,} bytes, but the manifest allows {self.most_bytes:,}"
            )

    def rows(
        self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes], batch_index: int
    ) -> tuple[Rows, int]:
        """Return the rows of a record batch, and the number of its first row in the shard.

        Raises:
            ShardFormatError: A checksum differs, or the batch cannot be decoded.
        """
        try:
            buffers = batch_buffers(batch, self.kinds)
            rows = rows_of_buffers(buffers, self.kinds)
            first_row = _row_number(metadata[FIRST_ROW_KEY])
            actual = batch_checksums(self.info.file, batch_index, first_row, buffers)
            is_whole = True
            for key, checksum in actual.items():
                is_whole &= metadata[key] == checksum
        except UNDECODABLE as error:
            raise self.undecodable(batch_index, error) from error
        if not is_whole:
            raise damaged(self.path, f"record batch {batch_index} fails its checksum")
        if not self._fits(rows, first_row, batch_index):
            info = self.info
            raise damaged(
                self.path,
                f"record batch {batch_index} has {len(rows):,} rows from row {first_row:,} and "
                f"{len(rows.ids):,} tokens, up to {int(rows.lengths.max()):,} in a row; the "
                f"manifest allows {info.batches:,} record batches with {info.rows:,} rows and "
                f"{info.tokens:,} tokens, up to {info.longest_row:,} in a row",
            )
        return rows, first_row

    def _fits(self, rows: Rows, first_row: int, batch_index: int) -> bool:
        """Return whether a record batch can be one of the shard that the manifest describes.

        Every other record batch has at least one row, and every row at least one token.
        """
        info, count, tokens = self.info, len(rows.lengths), len(rows.ids)
        longest = np.maximum.reduce(rows.lengths)
        before, after = batch_index, info.batches - 1 - batch_index
        left = info.rows - first_row - count
        return (
            (first_row >= before if before else first_row == 0)
            and (left >= after if after else left == 0)
            and info.tokens - tokens >= info.rows - count
            and longest <= info.longest_row
            and (info.batches > 1 or (tokens, longest) == (info.tokens, info.longest_row))
        )

    def undecodable(self, batch_index: int, cause: Exception) -> ShardFormatError:
        """Return the error for a record batch that cannot be decoded."""
        return refused(self.path, f"record batch {batch_index} cannot be decoded", cause)


_OFFSET_BYTES = 4
_MOST_DIGITS = 18


class _Read(NamedTuple):
    """The columns to read; see `ExpectedShard`."""

    kept: list[int]
    schema: pa.Schema
    whole_schema: pa.Schema
    kinds: Kinds
    buffers: tuple[int, ...]


@functools.cache
def _read_columns(
    vocabulary_size: int, columns: tuple[Column, ...], only: tuple[str, ...] | None
) -> _Read:
    """Return the columns to read, computed once because Arrow is slow at it."""
    whole = shard_schema(vocabulary_size, columns)
    kept = [n for n, name in enumerate(whole.names) if only is None or name in only]
    read = pa.schema([whole.field(n) for n in kept])
    buffers, end = list[int](), 0
    for number, field in enumerate(whole):
        first, end = end, end + (4 if pa.types.is_list(field.type) else 2)  # two of each array
        if number in kept:
            buffers += range(first, end)
    return _Read(kept, read, whole, column_kinds(read), tuple(buffers))


def _row_number(text: bytes) -> int:
    if not text.isdigit() or len(text) > _MOST_DIGITS:
        raise ValueError(f"its first row is {text[:40]!r}, expected a number")
    return int(text)


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
        self._file, self._reader, self._places = self._open(self._expected.kept)
        # other files are slower, and may have the rest elsewhere
        self._ahead = 0 if isinstance(self._file, pa.PythonFile) else _REST
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
            offset, head, _ = self._places.item(batch_index)
            self._expected.check_size(
                self._file.read_at(min(max(head, self._ahead), self._info.bytes), offset),
                head,
                lambda at: self._file.read_at(8, offset + at),
            )
            batch, metadata = self._reader.get_batch_with_custom_metadata(batch_index)
        except UNDECODABLE as error:
            raise self._expected.undecodable(batch_index, error) from error
        return self._expected.rows(batch, metadata, batch_index)

    def verify_file(self) -> None:
        """Compare the whole file's checksum with the manifest's: finds damage between batches."""
        digest = xxhash.xxh3_64()
        try:
            with self._store.open(self._info.file, self._info.bytes) as file:
                while block := file.read(_CHECKED_BYTES):
                    digest.update(block)
        except OSError as error:
            raise refused(self.path, "the file cannot be read", error) from error
        if (actual := digest.hexdigest()) != self._info.xxh3:
            raise damaged(self.path, f"the file has checksum {actual}, expected {self._info.xxh3}")

    def _open(self, kept: list[int]) -> tuple[pa.NativeFile, ipc.RecordBatchFileReader, np.ndarray]:
        """Open the file, to read some of its columns. Return also where its record batches are."""
        options = ipc.IpcReadOptions(use_threads=False, included_fields=kept)
        try:
            size = self._store.size(self._info.file)
            if size != self._info.bytes:
                raise ShardFormatError(
                    f"{self.path}: expected {self._info.bytes:,} bytes, got {size:,}: the file was "
                    "cut short or replaced. Copy it again, or run `pretokenize` again."
                )
            file = self._store.open(self._info.file, size)
            reader = ipc.open_file(file, options=options)
            end = file.read_at(arrow_file.AFTER_FOOTER, size - arrow_file.AFTER_FOOTER)
            length = min(arrow_file.missing_bytes(end), size)
            return file, reader, arrow_file.blocks(file.read_at(length, size - length))
        except FileNotFoundError as error:
            raise ShardFormatError(
                f"{self.path}: not found, but the manifest names it. Copy it again."
            ) from error
        except ShardFormatError:
            raise
        except UNDECODABLE as error:
            raise refused(self.path, "its header or footer cannot be read", error) from error
