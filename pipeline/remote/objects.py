"""What a store says of an object, and gives of it."""

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tokenfeed.pipeline.errors import RemoteError

__all__ = ["FileFacts", "ObjectInfo", "VersionedBytes", "cut_short", "version_of"]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object."""

    name: str
    size: int
    etag: str
    """Differs for another version; empty where a server tells none, and in a list of Google's."""
    version: str
    """As `VersionedBytes` has it; of a list, its times may be finer."""
    modified_s: float = 0.0
    """When it was written, by the store's clock."""
    metadata: dict[str, str] = field(default_factory=dict)
    """What was given when it was written; of a list always empty."""


class FileFacts(Protocol):
    """What a manifest says about a file."""

    @property
    def file(self) -> str:
        """Its name below the data set."""
        ...

    @property
    def bytes(self) -> int:
        """Its size."""
        ...

    @property
    def xxh3(self) -> str:
        """The xxh3-64 of its content, 16 hex digits."""
        ...


class VersionedBytes(NamedTuple):
    """Some bytes of an object."""

    data: bytes
    version: str
    """Of the object: what has another content has another one, but equal contents may differ here,
    as replicas do; empty where nothing is told."""


def version_of(meta: Mapping[str, Any]) -> str:
    """The version of an object by what came with its bytes: the ETag, or time and size."""
    etag: str = (meta["e_tag"] or "").removeprefix("W/")
    return etag or f"{meta['last_modified'].timestamp()} {meta['size']}"


def cut_short(place: str, end: int, size: int) -> RemoteError:
    """What to raise where bytes up to `end` were asked for, and there are `size` in all."""
    return RemoteError(
        errno.EINVAL,
        f"expected bytes up to {end:,}, got {size:,} in all: it was cut short or replaced. Copy it "
        "again",
        place,
    )
