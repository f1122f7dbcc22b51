"""Write a shard: rows become record batches with checksums, and the file gets its seal.

`shard` has the format, and reads it. Torch-free.
"""

from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
import pyarrow as pa
import xxhash
from pyarrow import ipc

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import ShardInfo
from tokenfeed.pipeline.format.schema import Column, Rows, record_batch, shard_schema
from tokenfeed.pipeline.format.shard import FIRST_ROW_KEY, SEAL_KEY, batch_checksums, shard_metadata
from tokenfeed.pipeline.format.storage import atomic_file, file_xxh3

UNSEALED = "(not yet sealed)"
"""Placeholder of the same length for the seal, until all record batches are written."""
_SCHEMA_BYTES = 1 << 16  # more than the size of the schema at the beginning of a file


def set_seal(file: IO[bytes], footer: int, seal: str) -> None:
    """Write the seal into both schemas of a shard. The footer begins after byte `footer`.

    Arrow writes the schema before the record batches, so the seal is not known then.
    """
    for start, size in ((0, _SCHEMA_BYTES), (footer, -1)):
        file.seek(start)
        file.seek(start + file.read(size).index(UNSEALED.encode()))
        file.write(seal.encode())


BATCH_TOKENS = 1 << 16
"""A record batch ends with the row that reaches this many tokens. Small batches shuffle better,
large batches compress better."""
BATCH_ROWS = 1 << 14
ZSTD_LEVEL = 1
"""Level 3 saves 7 % more bytes, but needs a third more time to write and a tenth more to read."""


class ShardWriter:
    """Writes one shard. The file gets its name when `close` has synced it.

    The ends of record batches depend on the rows only, not on the calls of `append`, so the same
    rows give the same bytes. As a context manager, it closes on success and discards on an error.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        vocabulary_size: int,
        columns: tuple[Column, ...] = (),
        *,
        is_shared: bool = False,
    ) -> None:
        """Create the file. `is_shared`: other processes may write the same shard at the same
        time."""
        self.info: ShardInfo | None = None
        """The shard's entry for the manifest; set by `close`."""
        self.path = folder / name
        self._name = name
        self._vocabulary_size = vocabulary_size
        self._file = atomic_file(self.path, is_shared=is_shared)
        schema = shard_schema(vocabulary_size, columns)
        options = ipc.IpcWriteOptions(compression=pa.Codec("zstd", ZSTD_LEVEL), use_threads=False)
        self._sink = self._file.__enter__()
        described = schema.with_metadata(
            shard_metadata(name, vocabulary_size) | {SEAL_KEY: UNSEALED}
        )
        self._writer = ipc.new_file(self._sink, described, options=options)
        self._seal = xxhash.xxh3_64()
        self._schema = schema
        self._pending: list[Rows] = []
        self._pending_tokens = self._pending_rows = 0
        self._rows = self._tokens = self._batches = self._longest = 0

    def append(self, rows: Rows) -> None:
        """Add rows. They are written one record batch at a time.

        Raises:
            ConfigError: A row is empty, or an id does not fit the vocabulary.
        """
        if not len(rows):
            return
        if rows.lengths.min() < 1:
            raise ConfigError(f"{self._name}: a row without tokens cannot be written.")
        if (largest := int(rows.ids.max())) >= self._vocabulary_size:
            raise ConfigError(
                f"{self._name}: token id {largest} does not fit a vocabulary of "
                f"{self._vocabulary_size:,}."
            )
        rest = self._write_full_batches(rows)
        if len(rest):
            self._pending.append(rest)
        self._pending_tokens += len(rest.ids)
        self._pending_rows += len(rest)

    def close(self) -> ShardInfo:
        """Write the remaining rows, sync, and name the file. A second call does nothing."""
        if self.info:
            return self.info
        if self._pending_rows:
            self._write_batch(Rows.concatenate(self._pending))
        end, seal = self._sink.tell(), self._seal.hexdigest()
        self._writer.close()
        set_seal(self._sink, end, seal)
        self._file.__exit__(None, None, None)
        self.info = ShardInfo(
            file=self._name,
            bytes=self.path.stat().st_size,
            xxh3=file_xxh3(self.path),
            rows=self._rows,
            tokens=self._tokens,
            batches=self._batches,
            longest_row=self._longest,
            seal=seal,
        )
        return self.info

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.__exit__(kind, error, traceback)

    def _write_full_batches(self, rows: Rows) -> Rows:
        """Write all full record batches of pending rows and `rows`; return the remaining rows."""
        ends = np.cumsum(rows.lengths)
        begin = 0
        while True:
            tokens = int(ends[begin - 1]) if begin else 0
            full = tokens + BATCH_TOKENS - self._pending_tokens
            end = min(int(np.searchsorted(ends, full)) + 1, begin + BATCH_ROWS - self._pending_rows)
            if end > len(rows):
                return rows.slice(begin, len(rows))
            self._write_batch(Rows.concatenate([*self._pending, rows.slice(begin, end)]))
            self._pending, self._pending_tokens, self._pending_rows = [], 0, 0
            begin = end

    def _write_batch(self, rows: Rows) -> None:
        batch, buffers = record_batch(rows, self._schema)
        checksums = batch_checksums(self._name, self._batches, self._rows, buffers)
        self._writer.write_batch(
            batch, custom_metadata={FIRST_ROW_KEY: str(self._rows)} | checksums
        )
        self._seal.update(b"".join(checksums.values()))
        self._batches += 1
        self._rows += len(rows)
        self._tokens += len(rows.ids)
        self._longest = max(self._longest, int(rows.lengths.max()))
