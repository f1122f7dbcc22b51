"""A shard read by ranges of bytes: where its record batches lie, and rows out of the bytes of one.

For stores in which a request costs more than the bytes it brings. The end of a shard names the
place of every record batch, in 24 bytes each; with it, a record batch is one request. Arrow itself
would make three, one after the other. Torch-free.
"""

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from tokenfeed.pipeline.errors import ShardFormatError
from tokenfeed.pipeline.format.manifest import ShardInfo
from tokenfeed.pipeline.format.read_errors import damaged
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.verification import UNDECODABLE, ExpectedShard

__all__ = ["RangedShard", "end_bytes", "missing_bytes"]

_BLOCK = np.dtype(
    {
        "names": ["offset", "head", "body"],
        "formats": ["<i8", "<i4", "<i8"],
        "offsets": [0, 8, 16],
        "itemsize": 24,
    }
)
"""Where a record batch lies, as Arrow writes it into the footer."""
_MAGIC, _LENGTH = b"ARROW1", struct.Struct("<i")
_BEGIN = _MAGIC + bytes(2)  # of a file: Arrow wants room for it before the footer
_AFTER_FOOTER = _LENGTH.size + len(_MAGIC)
_STREAM_END = 8  # bytes between the last record batch and the footer
_BATCHES_FIELD = 3  # of a footer's table: version, schema, dictionaries, record batches
_REST = 1 << 12
"""More than a footer takes beside its blocks: the schema, with names and types of columns."""


def end_bytes(info: ShardInfo) -> int:
    """How much of a shard's end holds its footer, as a rule; see `missing_bytes`."""
    return min(info.bytes, info.batches * _BLOCK.itemsize + _REST)


def missing_bytes(end: bytes) -> int:
    """How much the footer needs if these bytes of a shard's end are too few; else 0."""
    if len(end) < _AFTER_FOOTER or not end.endswith(_MAGIC):
        return 0  # no Arrow file: more of it would not help
    needed = _LENGTH.unpack_from(end, len(end) - _AFTER_FOOTER)[0] + _AFTER_FOOTER
    return int(needed) if needed > len(end) else 0


@dataclass(frozen=True, slots=True)
class RangedShard:
    """The record batches of one shard, of which nothing but the footer is at hand."""

    expected: ExpectedShard
    edges: np.ndarray
    """Where each record batch begins, and the last one ends, shape (K + 1,), int64."""
    head: bytes
    """The schema, as a stream of record batches begins."""

    @classmethod
    def from_end(cls, expected: ExpectedShard, end: bytes) -> Self:
        """Read the footer.

        Args:
            expected: What the shard has to be.
            end: Its last bytes, at least the whole footer.

        Raises:
            ShardFormatError: They are damaged, or of another shard.
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
        """Where neighbouring record batches begin in the file, and how many bytes they take."""
        start, stop = self.edges[first], self.edges[first + count]
        return int(start), int(stop - start)

    def cut(self, first: int, count: int, data: bytes) -> list[bytes]:
        """The record batches in the bytes of neighbouring ones."""
        edges = (self.edges[first : first + count + 1] - self.edges[first]).tolist()
        return [data[start:stop] for start, stop in pairwise(edges)]

    def rows(self, batch_index: int, data: bytes) -> tuple[Rows, int]:
        """Decode and check one record batch; see `ShardReader.read`.

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
        if rest:  # a good one, of a shard that took its place
            raise damaged(expected.path, f"record batch {batch_index} is {rest:,} bytes too short")
        return expected.rows(batch, metadata or {}, batch_index)


def _footer_bytes(end: bytes) -> int:
    (length,) = _LENGTH.unpack_from(end, len(end) - _AFTER_FOOTER)
    return int(length)


def _blocks(footer: bytes) -> np.ndarray:
    """The blocks in a footer, which is a flatbuffer, shape (K,), of `_BLOCK`."""

    def number(at: int) -> int:
        return int(struct.unpack_from("<I", footer, at)[0])

    table = number(0)
    fields = table - struct.unpack_from("<i", footer, table)[0]
    of_batches = table + struct.unpack_from("<H", footer, fields + 4 + 2 * _BATCHES_FIELD)[0]
    vector = of_batches + number(of_batches)
    return np.frombuffer(footer, _BLOCK, number(vector), vector + 4)


def _edges(expected: ExpectedShard, blocks: np.ndarray, footer_bytes: int) -> np.ndarray:
    """Where record batches begin and end; they follow each other without a gap up to the footer.

    So a flipped bit in a place or length is found here, and nobody asks for bytes that are none.

    Raises:
        ShardFormatError: They do not.
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
