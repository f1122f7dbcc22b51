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
other exception is a bug in tokenfeed and keeps its traceback.
"""

from tokenfeed.pipeline.redaction import without_secrets

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
    """A missing object."""


class LoaderError(TokenfeedError, RuntimeError):
    """A loader worker that died or hangs, or a loader used by two threads."""


class ResumeError(TokenfeedError):
    """A saved state that belongs to other data, another plan or another model."""
