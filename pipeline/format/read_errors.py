"""Error messages for files that cannot be read."""

import errno
import os

from tokenfeed.pipeline.errors import RemoteError, ShardFormatError

_REMEDIES = {
    errno.ENOMEM: "The machine lacks memory: use fewer workers or a smaller `window_tokens`. If it "
    "has enough, the shard may be damaged: run `shards verify`.",
    errno.EMFILE: "Too many files are open at once: close some, or raise the limit (`ulimit -n`).",
    errno.EACCES: "Give the user of this process permission to read it.",
}
_DISK = (
    "The disk or its network failed, and the shard may be intact: repair the disk and run again."
)


def damaged(path: str, what: str, cause: BaseException | None = None) -> ShardFormatError:
    """Return the error for a damaged file."""
    because = f" ({error_line(cause)})" if cause else ""
    remedy = "Copy the file again, or run `pretokenize` again."
    return ShardFormatError(f"{path}: {what}{because}. {remedy}")


def refused(path: str, what: str, cause: Exception) -> ShardFormatError:
    """Return the error for a failed read, with a remedy for the machine if it is the cause."""
    if isinstance(cause, RemoteError):  # it has its own remedy
        return ShardFormatError(f"{path}: {what}: {cause.strerror}.")
    if isinstance(cause, MemoryError):
        number: int | None = errno.ENOMEM
    else:
        number = cause.errno if isinstance(cause, OSError) else None
    if number in (None, errno.EINVAL):  # EINVAL: a stitched file
        return damaged(path, what, cause)
    return ShardFormatError(
        f"{path}: {what}: {os.strerror(number)}. {_REMEDIES.get(number, _DISK)}"
    )


def gave_up(cause: BaseException | None) -> bool:
    """Return whether a store did not answer in all the time for retries."""
    return isinstance(cause, RemoteError) and cause.errno == errno.ETIMEDOUT


def error_line(cause: BaseException) -> str:
    """Return the message of an error in one line. Arrow adds its own source position in more
    lines."""
    said = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(said.split())
