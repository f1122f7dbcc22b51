"""Read what an Arrow file says about its record batches, without decoding any.

The footer has the place of every record batch, in 24 bytes each. The message of a record batch has
the place of every buffer, and a compressed buffer begins with its size after decompression. With
these sizes a reader can reject a small file that would fill the memory. Both are flatbuffers, of
which only the needed fields are read. Arrow verifies the rest. Torch-free.
"""

import struct
from collections.abc import Callable, Sequence

import numpy as np

_BLOCK = np.dtype(
    {
        "names": ["offset", "head", "body"],
        "formats": ["<i8", "<i4", "<i8"],
        "offsets": [0, 8, 16],
        "itemsize": 24,
    }
)
"""Position of a record batch in the Arrow footer (struct `Block` of Arrow's File.fbs): the first
byte of its message, the bytes of the message, and the bytes of the buffers that follow."""
BLOCK_BYTES = _BLOCK.itemsize
_MAGIC = b"ARROW1"
_BEGIN = _MAGIC + bytes(2)
_INT32, _UINT32, _INT64 = struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<q")
_BUFFER = struct.Struct("<qq")
_VTABLE = struct.Struct("<6H")  # its size, the size of the table, the places of four fields
AFTER_FOOTER = _INT32.size + len(_MAGIC)
_MARK = b"\xff\xff\xff\xff"
_BEFORE_MESSAGE, _COUNT_BYTES = 8, 4  # the mark and a length; the count of a vector
_VERSION_5 = 4
UNREADABLE = (struct.error, IndexError)
"""Errors of this module for bytes that are not those of an Arrow file, beside ValueError."""


def missing_bytes(end: bytes) -> int:
    """Return the bytes that the footer needs if `end` is too short; else 0."""
    if len(end) < AFTER_FOOTER or not end.endswith(_MAGIC):
        return 0  # not an Arrow file: more bytes would not help
    needed = footer_bytes(end) + AFTER_FOOTER
    return needed if needed > len(end) else 0


def footer_bytes(end: bytes) -> int:
    """Return the size of the footer, from the last bytes of a file."""
    return int(_INT32.unpack_from(end, len(end) - AFTER_FOOTER)[0])


def file_of_end(end: bytes) -> bytes:
    """Return a file with this end that Arrow opens, to read its schema."""
    return _BEGIN + end


def blocks(end: bytes) -> np.ndarray:
    """Return the places of the record batches, shape (K,), with `offset`, `head` and `body`.

    Args:
        end: The last bytes of a file, with at least the whole footer.
    """
    footer = end[len(end) - AFTER_FOOTER - footer_bytes(end) : -AFTER_FOOTER]
    table, _, _, _, batches = _fields(footer, 0)
    vector = _target(footer, table + batches)
    (count,) = _UINT32.unpack_from(footer, vector)
    return np.frombuffer(footer, _BLOCK, count, vector + _COUNT_BYTES)


def message_bytes(message: bytes) -> int:
    """Return the bytes of the message of a record batch, from its first bytes."""
    return int(_BEFORE_MESSAGE + _UINT32.unpack_from(message, 4)[0])


def decoded_bytes(
    message: bytes, body: int, numbers: Sequence[int], read: Callable[[int], bytes] | None
) -> int:
    """Return the bytes that some buffers of a record batch have after decompression.

    Args:
        message: The first bytes of the record batch, with the whole message.
        body: Where its buffers begin.
        numbers: Which buffers, in the order of Arrow.
        read: Returns 8 bytes that are behind the end of `message`; None if it is the whole batch.

    Returns:
        The sum of the sizes. 0 if the buffers are not compressed: they are in the file as they are.

    Raises:
        ValueError: The message is of an old version, which has its compression elsewhere.
    """
    table, version, _, header, _ = _fields(message, _BEFORE_MESSAGE)
    if message[:4] != _MARK or not version or message[table + version] != _VERSION_5:
        raise ValueError("not a message of version 5 of Arrow")
    table, _, _, buffers, compression = _fields(message, table + header)
    if not compression:
        return 0
    first = _target(message, table + buffers) + _COUNT_BYTES
    total = 0
    for number in numbers:
        offset, length = _BUFFER.unpack_from(message, first + _BUFFER.size * number)
        if length:
            at = body + offset
            begin = message[at : at + 8] if read is None or at + 8 <= len(message) else read(at)
            (size,) = _INT64.unpack(begin)
            total += size if size >= 0 else max(length, 0)  # -1: this buffer is not compressed
    return total


def _fields(data: bytes, at: int) -> tuple[int, int, int, int, int]:
    """Follow the reference at a place to a table; return where it is, and the places of its first
    four fields within it.

    The place of an absent field is 0. Only the last field can be absent.
    """
    table = _target(data, at)
    (distance,) = _INT32.unpack_from(data, table)
    size, _, one, two, three, four = _VTABLE.unpack_from(data, table - distance)
    if size < _VTABLE.size - 2:
        raise ValueError("a table has too few fields")
    return table, one, two, three, four if size >= _VTABLE.size else 0


def _target(data: bytes, at: int) -> int:
    """Return where the reference at a place points: to a table or a vector."""
    (distance,) = _UINT32.unpack_from(data, at)
    return at + int(distance)
