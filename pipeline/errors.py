"""Every error a user can meet, in one tree.

    TokenfeedError
    ├── ConfigError       a setting that cannot work             (also a ValueError)
    ├── CorpusError       input texts that cannot be read
    ├── TokenizerError    a tokenizer that cannot be loaded or does not fit
    ├── ManifestError     manifest.json missing, damaged or of another version (also a ValueError)
    ├── ShardFormatError  a shard that is not what the manifest says           (also a ValueError)
    ├── RemoteError       a store that cannot be reached or refuses   (also an OSError with errno)
    │   └── RemoteMissingError    an object that is not there            (also a FileNotFoundError)
    ├── LoaderError       a loader worker that died
    └── ResumeError       a saved state that does not belong here

A message says what and where, what was expected and what was found, and the remedy, in one line.
Anything else that is raised is a bug of ours and keeps its traceback.
"""

__all__ = [
    "ConfigError",
    "CorpusError",
    "LoaderError",
    "ManifestError",
    "RemoteError",
    "RemoteMissingError",
    "ResumeError",
    "ShardFormatError",
    "TokenfeedError",
    "TokenizerError",
]


class TokenfeedError(Exception):
    """Base of all errors raised on purpose: catch this one to catch them all."""


class ConfigError(TokenfeedError, ValueError):
    """A setting that cannot work, alone or with another."""


class CorpusError(TokenfeedError):
    """Input texts that are missing or cannot be read."""


class TokenizerError(TokenfeedError):
    """A tokenizer that cannot be loaded, or does not fit the shards."""


class ManifestError(TokenfeedError, ValueError):
    """A manifest that is missing, damaged, or of a format version this code does not know."""


class ShardFormatError(TokenfeedError, ValueError):
    """A shard that is missing, unreadable, cut short, altered, or not the one that is meant."""


class RemoteError(TokenfeedError, OSError):
    """A store that cannot be reached, or refuses: made of errno, what happened, and where."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}."


class RemoteMissingError(RemoteError, FileNotFoundError):
    """An object that is not there."""


class LoaderError(TokenfeedError, RuntimeError):
    """A loader worker that died or hangs."""


class ResumeError(TokenfeedError):
    """A saved state that belongs to other data, another plan or another model."""
