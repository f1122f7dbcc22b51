"""Writing an object once: in how many parts, and the truth where an answer was lost."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenfeed.pipeline.remote.client import Connection
from tokenfeed.pipeline.remote.retrying import Traffic

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

__all__ = ["is_quick", "put", "put_if"]

_ONE_REQUEST_BYTES = 64 << 20
_PART_BYTES, _PARTS_AT_ONCE = 16 << 20, 4
_QUICK_BYTES = 1 << 20
"""So much is sent before anybody has to wait."""


def is_quick(size: int) -> bool:
    """Whether so many bytes are sent in no time."""
    return size <= _QUICK_BYTES


def put(
    connection: Connection,
    name: str,
    data: bytes | Path,
    size: int,
    metadata: dict[str, str] | None,
) -> Mapping[str, Any]:
    """Put an object, a large one in parts; gives what the store says of it."""
    in_parts = size > _ONE_REQUEST_BYTES
    content = data.read_bytes() if isinstance(data, Path) and not in_parts else data
    client = connection.reads if is_quick(size) else connection.writes
    result = client.put(
        name,
        content,
        attributes=metadata,
        use_multipart=in_parts,
        chunk_size=_PART_BYTES,
        max_concurrency=_PARTS_AT_ONCE,
    )
    connection.meter.add(Traffic(bytes=size))
    return result


def put_if(connection: Connection, name: str, data: bytes, mode: Any) -> bool:
    """Put an object under a condition; whether it now has this content."""
    try:
        connection.reads.put(name, data, mode=mode, use_multipart=False)
    except Exception as error:
        return _settled(connection.reads, name, data, error)
    connection.meter.add(Traffic(bytes=len(data)))
    return True


def _settled(client: "Client", name: str, data: bytes, error: Exception) -> bool:
    """What a write that did not succeed came to; raises where it may be tried again."""
    from obstore.exceptions import PreconditionError

    refused = isinstance(error, PreconditionError)
    try:
        found = bytes(client.get(name).bytes())
    except FileNotFoundError:
        if refused:
            return False
        raise error from None
    if found == data:
        return True
    if refused or type(error).__name__ == "AlreadyExistsError":
        return False
    raise error
