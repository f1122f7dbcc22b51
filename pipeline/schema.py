"""What columns a shard has, and how wide a token is on disk.

Tokens take two bytes while the vocabulary fits, else four: disk, page cache, inter-process copies
and the wire to the GPU all shrink with them. They are widened to int64 on the device, not before.
"""

import numpy as np
import pyarrow as pa

__all__ = [
    "FORMAT_VERSION",
    "INPUT_IDS",
    "ORIGIN_FILE",
    "ORIGIN_RECORD",
    "shard_schema",
    "token_dtype",
]

FORMAT_VERSION = 1

INPUT_IDS = "input_ids"
ORIGIN_FILE = "origin_file"
"""Which input file a row came from: a line number, counted from 0, of sources.jsonl."""
ORIGIN_RECORD = "origin_record"
"""Which record of that file: line or row number, counted from 0; 0 where a file is one document."""


def token_dtype(vocabulary_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """The dtype of ids on disk: uint16 up to 65,536 ids, else uint32."""
    return np.dtype(np.uint16) if vocabulary_size <= 1 << 16 else np.dtype(np.uint32)


def shard_schema(vocabulary_size: int) -> pa.Schema:
    """The Arrow schema of a language-modelling shard, without its metadata. Nothing is nullable."""
    ids = pa.list_(pa.field("item", pa.from_numpy_dtype(token_dtype(vocabulary_size)), False))
    return pa.schema(
        [
            pa.field(INPUT_IDS, ids, nullable=False),
            pa.field(ORIGIN_FILE, pa.uint32(), nullable=False),
            pa.field(ORIGIN_RECORD, pa.uint64(), nullable=False),
        ]
    )
