"""What a shard has to be by its manifest, and its record batches: the same however bytes come.

Every way of reading a shard ends here: its schema is compared when it is opened, and the content of
a record batch is hashed and compared when it is decoded. Torch-free.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from tokenfeed.pipeline.errors import ShardFormatError
from tokenfeed.pipeline.format.identity import (
    FIRST_ROW_KEY,
    SEAL_KEY,
    batch_checksums,
    shard_metadata,
)
from tokenfeed.pipeline.format.manifest import ShardInfo
from tokenfeed.pipeline.format.reading import damaged, refused
from tokenfeed.pipeline.format.rows import Kinds, Rows, batch_buffers, column_kinds, rows_of_buffers
from tokenfeed.pipeline.format.schema import Column, shard_schema

__all__ = ["UNDECODABLE", "ExpectedShard"]

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
