"""What proves that a shard, and each record batch of it, is the one the manifest means.

Every column of a record batch has a checksum; the seal is one over all of these, kept by the shard
and by the manifest. It stands in the schema, which opening a shard reads in any case, so a shard
with other rows is refused before a row of it is read, and at no cost. Torch-free.
"""

import struct
from typing import IO

import numpy as np
import xxhash

from tokenfeed.pipeline.format.schema import FORMAT_VERSION

__all__ = ["FIRST_ROW_KEY", "SEAL_KEY", "UNSEALED", "batch_checksums", "set_seal", "shard_metadata"]

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
