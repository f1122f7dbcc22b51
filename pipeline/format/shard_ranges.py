"""Read a shard by byte ranges: find its record batches in the footer, and decode their bytes.

For stores, in which a request costs more time than its bytes. The footer has the position of every
record batch, in 24 bytes each. With it, a record batch needs one request. Arrow itself would make
three requests in sequence. Torch-free.
"""

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from tokenfeed.pipeline.errors import ShardFormatError, damaged
from tokenfeed.pipeline.format.manifest import ShardInfo
from tokenfeed.pipeline.format.schema import Rows
from tokenfeed.pipeline.format.shard import UNDECODABLE, ExpectedShard

_BLOCK = np.dtype(
    {
        "names": ["offset", "head", "body"],
        "formats": ["<i8", "<i4", "<i8"],
        "offsets": [0, 8, 16],
        "itemsize": 24,
    }
)
"""Position of a record batch in the Arrow footer (struct `Block` of Arrow's File.fbs)."""
_MAGIC, _LENGTH = b"ARROW1", struct.Struct("<i")
_BEGIN = _MAGIC + bytes(2)  # of a file: Arrow requires it before the footer
_AFTER_FOOTER = _LENGTH.size + len(_MAGIC)
_STREAM_END = 8  # bytes between the last record batch and the footer
_BATCHES_FIELD = 3  # of a footer's table: version, schema, dictionaries, record batches
_REST = 1 << 12
"""More bytes than the rest of a footer: the schema, with names and types of columns."""


def end_bytes(info: ShardInfo) -> int:
    """Return the bytes at the end of a shard that usually include its footer; see
    `missing_bytes`."""
    return min(info.bytes, info.batches * _BLOCK.itemsize + _REST)


def missing_bytes(end: bytes) -> int:
    """Return the bytes that the footer needs if `end` is too short; else 0."""
    if len(end) < _AFTER_FOOTER or not end.endswith(_MAGIC):
        return 0  # not an Arrow file: more bytes would not help
    needed = _LENGTH.unpack_from(end, len(end) - _AFTER_FOOTER)[0] + _AFTER_FOOTER
    return int(needed) if needed > len(end) else 0


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
            stored = ipc.open_file(pa.py_buffer(_BEGIN + end), options=options)
            footer = end[len(end) - _AFTER_FOOTER - _footer_bytes(end) : -_AFTER_FOOTER]
            blocks = _blocks(footer)
        except (*UNDECODABLE, struct.error, IndexError) as error:
            raise damaged(expected.path, "its footer cannot be read", error) from error
        expected.check(stored.schema, stored.num_record_batches)
        head = expected.whole_schema.serialize().to_pybytes()
        return cls(expected, _edges(expected, blocks, len(footer)), head)

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
            stream = ipc.open_stream(source, options=options)
            batch, metadata = stream.read_next_batch_with_custom_metadata()
        except (*UNDECODABLE, StopIteration) as error:
            raise expected.undecodable(batch_index, error) from error
        rest = len(self.head) + len(data) - source.tell()
        if rest:  # a valid batch of a shard that replaced this one
            raise damaged(expected.path, f"record batch {batch_index} is {rest:,} bytes too short")
        return expected.rows(batch, metadata or {}, batch_index)


def _footer_bytes(end: bytes) -> int:
    (length,) = _LENGTH.unpack_from(end, len(end) - _AFTER_FOOTER)
    return int(length)


def _blocks(footer: bytes) -> np.ndarray:
    """Return the blocks of a footer, a flatbuffer, shape (K,), dtype `_BLOCK`."""

    def number(at: int) -> int:
        return int(struct.unpack_from("<I", footer, at)[0])

    table = number(0)
    fields = table - struct.unpack_from("<i", footer, table)[0]
    of_batches = table + struct.unpack_from("<H", footer, fields + 4 + 2 * _BATCHES_FIELD)[0]
    vector = of_batches + number(of_batches)
    return np.frombuffer(footer, _BLOCK, number(vector), vector + 4)


def _edges(expected: ExpectedShard, blocks: np.ndarray, footer_bytes: int) -> np.ndarray:
    """Return where record batches begin and end.

    They must follow each other without gaps, up to the footer. So a flipped bit in a position or
    length is found here, before any request uses it.

    Raises:
        ShardFormatError: The record batches have gaps or overlap.
    """
    starts = blocks["offset"].astype(np.int64)
    stops = starts + blocks["head"] + blocks["body"]
    end = expected.info.bytes - _AFTER_FOOTER - footer_bytes - _STREAM_END
    if (starts[1:] != stops[:-1]).any() or (starts >= stops).any() or (stops[-1:] != end).any():
        raise ShardFormatError(
            f"{expected.path}: its record batches do not fill the {expected.info.bytes:,} bytes "
            "that the manifest has: the file was cut short, replaced or damaged. Copy it again, or "
            "run `pretokenize` again."
        )
    return np.append(starts, stops[-1:])
