"""Read a shard by byte ranges: find its record batches in the footer, and decode their bytes.

For stores, in which a request costs more time than its bytes. The footer has the position of every
record batch, in 24 bytes each. With it, a record batch needs one request. Arrow itself would make
three requests in sequence. Torch-free.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from tokenfeed.pipeline.errors import ShardFormatError, damaged
from tokenfeed.pipeline.format.arrow_file import (
    AFTER_FOOTER,
    blocks,
    file_of_end,
    footer_bytes,
)
from tokenfeed.pipeline.format.schema import Rows
from tokenfeed.pipeline.format.shard import UNDECODABLE, ExpectedShard

_STREAM_END = 8  # bytes between the last record batch and the footer


@dataclass(frozen=True, slots=True)
class RangedShard:
    """The record batches of one shard whose footer was read."""

    expected: ExpectedShard
    edges: np.ndarray
    """Byte at which each record batch begins, and the end of the last one, shape (K + 1,),
    int64."""
    head: bytes
    """The schema as the beginning of an Arrow stream."""

    @classmethod
    def from_end(cls, expected: ExpectedShard, end: bytes) -> Self:
        """Read the footer.

        Args:
            expected: What the manifest says about the shard.
            end: The last bytes of the shard, with at least the whole footer.

        Raises:
            ShardFormatError: The footer is damaged, or of another shard.
        """
        options = ipc.IpcReadOptions(use_threads=False, included_fields=expected.kept)
        try:
            stored = ipc.open_file(pa.py_buffer(file_of_end(end)), options=options)
            places = blocks(end)
        except UNDECODABLE as error:
            raise damaged(expected.path, "its footer cannot be read", error) from error
        expected.check(stored.schema, stored.num_record_batches)
        head = expected.whole_schema.serialize().to_pybytes()
        return cls(expected, _edges(expected, places, footer_bytes(end)), head)

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return the first byte and the number of bytes of neighbouring record batches."""
        start, stop = self.edges[first], self.edges[first + count]
        return int(start), int(stop - start)

    def cut(self, first: int, count: int, data: bytes) -> list[bytes]:
        """Split the bytes of neighbouring record batches."""
        edges = (self.edges[first : first + count + 1] - self.edges[first]).tolist()
        return [data[start:stop] for start, stop in pairwise(edges)]

    def rows(self, batch_index: int, data: bytes) -> tuple[Rows, int]:
        """Decode and verify one record batch; see `ShardReader.read`.

        Raises:
            ShardFormatError: The bytes are not those of this record batch.
        """
        expected, source = self.expected, pa.BufferReader(self.head + data)
        options = ipc.IpcReadOptions(use_threads=False, included_fields=expected.kept)
        try:
            expected.check_size(data)
            stream = ipc.open_stream(source, options=options)
            batch, metadata = stream.read_next_batch_with_custom_metadata()
        except (*UNDECODABLE, StopIteration) as error:
            raise expected.undecodable(batch_index, error) from error
        rest = len(self.head) + len(data) - source.tell()
        if rest:  # a valid batch of a shard that replaced this one
            raise damaged(expected.path, f"record batch {batch_index} is {rest:,} bytes too short")
        return expected.rows(batch, metadata or {}, batch_index)


def _edges(expected: ExpectedShard, places: np.ndarray, footer: int) -> np.ndarray:
    """Return where record batches begin and end.

    They must follow each other without gaps, up to the footer. So a flipped bit in a position or
    length is found here, before any request uses it.

    Raises:
        ShardFormatError: The record batches have gaps or overlap.
    """
    starts = places["offset"].astype(np.int64)
    stops = starts + places["head"] + places["body"]
    end = expected.info.bytes - AFTER_FOOTER - footer - _STREAM_END
    if (starts[1:] != stops[:-1]).any() or (starts >= stops).any() or (stops[-1:] != end).any():
        raise ShardFormatError(
            f"{expected.path}: its record batches do not fill the {expected.info.bytes:,} bytes "
            "that the manifest has: the file was cut short, replaced or damaged. Copy it again, or "
            "run `pretokenize` again."
        )
    return np.append(starts, stops[-1:])
