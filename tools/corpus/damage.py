"""What a damaged file of any format raises, and how a machine that is full is told from one."""

import errno
import re

import pyarrow as pa

from tokenfeed.tools.corpus.blocks import READ_ERRORS

__all__ = ["DAMAGE", "damage_reason"]

DAMAGE = (*READ_ERRORS, pa.ArrowException, ValueError, RecursionError)
_ALLOCATION = re.compile(r"\bsize (\d{14,})\b")
"""An allocation too large for any machine: its length was damaged."""
_MACHINE_IS_FULL = {errno.ENOMEM, errno.EMFILE, errno.ENFILE}


def damage_reason(error: Exception) -> str:
    """What is wrong with the file, in one line.

    Raises:
        Exception: `error` itself, where the machine is short of something and the file is sound.
    """
    is_shortage = isinstance(error, MemoryError) and not _ALLOCATION.search(str(error))
    if is_shortage or getattr(error, "errno", None) in _MACHINE_IS_FULL:
        raise error
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split())
