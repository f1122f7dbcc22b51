"""Whether a store keeps its word where two write at once: some take any write and say nothing."""

import secrets

from tokenfeed.pipeline.remote.object_store import ObjectStore

__all__ = ["keeps_conditions"]


def keeps_conditions(store: ObjectStore) -> bool:
    """Whether a second `create`, and a `replace` of what has changed, are refused.

    It writes an object of a few bytes with a name of its own, and removes it: eight requests.
    """
    name = f".tokenfeed-probe-{secrets.token_hex(8)}"
    try:
        if not store.create(name, b"first") or store.create(name, b"second"):
            return False
        before = store.head(name).etag
        store.write(name, b"third")
        return not store.replace(name, b"fourth", before)
    finally:
        store.delete(name)
