"""What a store says of an object, and gives of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["ObjectInfo", "Part", "version_of"]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object."""

    name: str
    size: int
    etag: str
    """Differs for another version; empty where a server tells none, and in a list of Google's."""
    version: str
    """As `Part` has it; of a list, its times may be finer."""
    modified_s: float = 0.0
    """When it was written, by the store's clock."""
    metadata: dict[str, str] = field(default_factory=dict)
    """What was given when it was written; of a list always empty."""


class Part(NamedTuple):
    """Some bytes of an object."""

    data: bytes
    version: str
    """Of the object: what has another content has another one, but equal contents may differ here,
    as replicas do; empty where nothing is told."""


def version_of(meta: Mapping[str, Any]) -> str:
    """The version of an object by what came with its bytes: the ETag, or time and size."""
    etag: str = (meta["e_tag"] or "").removeprefix("W/")
    return etag or f"{meta['last_modified'].timestamp()} {meta['size']}"
