"""All errors that tokenfeed raises on purpose.

    TokenfeedError
    ├── ConfigError       a setting that cannot work             (also a ValueError)
    ├── CorpusError       input texts that cannot be read
    ├── TokenizerError    a tokenizer that cannot be loaded or does not fit
    ├── ManifestError     manifest.json missing, damaged or of another version (also a ValueError)
    ├── ShardFormatError  a shard that differs from the manifest               (also a ValueError)
    ├── RemoteError       a store that cannot be reached or refuses   (also an OSError with errno)
    │   └── RemoteMissingError    an object that is not there            (also a FileNotFoundError)
    ├── LoaderError       a loader worker that died
    └── ResumeError       a saved state that does not belong here

A message is one line: what is wrong, where, the expected and the actual value, and the remedy. Any
other exception is a bug in tokenfeed and keeps its traceback. `damaged` and `refused` make the
errors for a file that cannot be read.
"""

import contextlib
import errno
import os
from collections.abc import Iterator

from tokenfeed.pipeline.text import without_secrets

_LONGEST = 1900


def _shown(message: str) -> str:
    """Return a message without secrets. A long one, with a value of a damaged file, is cut."""
    message = without_secrets(message)
    if len(message) <= _LONGEST:
        return message
    return f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"


class TokenfeedError(Exception):
    """Base class of all errors that tokenfeed raises on purpose. No message has a secret."""

    def __str__(self) -> str:
        return _shown(super().__str__())


class ConfigError(TokenfeedError, ValueError):
    """A setting that cannot work, alone or with another."""


class CorpusError(TokenfeedError):
    """Input texts that are missing or cannot be read."""


class TokenizerError(TokenfeedError):
    """A tokenizer that cannot be loaded, or does not fit the shards."""


class ManifestError(TokenfeedError, ValueError):
    """A manifest that is missing, damaged, or of a format version this code does not know."""


class ShardFormatError(TokenfeedError, ValueError):
    """A shard that is missing, unreadable, truncated, damaged, or not the one of the manifest."""


class RemoteError(TokenfeedError, OSError):
    """A store that cannot be reached or refuses a request. Arguments: errno, message, URL."""

    def __str__(self) -> str:
        return _shown(f"{self.filename}: {self.strerror}.")


class RemoteMissingError(RemoteError, FileNotFoundError):
    """An object that the store does not have."""


class LoaderError(TokenfeedError, RuntimeError):
    """A loader worker that died or hangs, or a loader used by two threads."""


class ResumeError(TokenfeedError):
    """A saved state that belongs to other data, another plan or another model."""


@contextlib.contextmanager
def memory_explained(what: str) -> Iterator[None]:
    """Turn a MemoryError into the error that names `what` needed the memory, and what to change."""
    try:
        yield
    except MemoryError as error:
        raise LoaderError(
            f"out of memory for {what} ({error_line(error)}). Use smaller batches, fewer workers "
            "(`num_workers`) or a smaller `window_tokens`, or raise the limits that `ulimit -a` "
            "names."
        ) from None


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
    if number in (None, errno.EINVAL):  # EINVAL: not a regular file
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
