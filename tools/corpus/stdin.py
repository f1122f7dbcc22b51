"""Standard input as a file that several processes can read, cut and read again.

It is copied to a nameless file beside the output, which the system deletes with this process,
however that ends. Its checksum says whether a continued run was fed the same again.
"""

import os
import sys
import tempfile
from pathlib import Path

import xxhash

from tokenfeed.pipeline.errors import CorpusError

__all__ = ["STANDARD_INPUT", "spool_stdin"]

STANDARD_INPUT = "-"
_BLOCK_BYTES = 1 << 20


def spool_stdin(out: Path | None) -> tuple[str, int]:
    """Copy standard input to the disk that `out` will lie on, or else to that of temporary files.

    Returns:
        A path under which this user's processes can open it while this process lives, and the
        xxh3-64 of its bytes.
    """
    if sys.stdin is None:
        raise CorpusError("`-`: standard input is closed.")
    folder = out and next(parent for parent in out.absolute().parents if parent.is_dir())
    digest = xxhash.xxh3_64()
    with tempfile.TemporaryFile(dir=folder) as file:
        while block := sys.stdin.buffer.read(_BLOCK_BYTES):
            digest.update(block)
            file.write(block)
        file.flush()
        descriptor = os.dup(file.fileno())  # stays open for the life of the process
    return f"/proc/{os.getpid()}/fd/{descriptor}", digest.intdigest()
