"""Whether bytes are UTF-8, at the speed of Arrow: a block of any size costs next to nothing."""

import codecs

import numpy as np
import pyarrow as pa

__all__ = ["IS_UTF16", "UTF16_MARKS", "is_utf8"]

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""What a file in UTF-16 begins with."""
IS_UTF16 = "the file is UTF-16; convert it to UTF-8"
"""The reason for rejecting such a file."""


def is_utf8(block: bytes) -> bool:
    """Whether a block is valid UTF-8 as a whole."""
    if block.isascii():
        return True
    ends = pa.py_buffer(np.array([0, len(block)], np.int64))
    text = pa.LargeStringArray.from_buffers(1, ends, pa.py_buffer(block))
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
