"""Read small files once: inside `reading_once`, a repeated read returns the first result.

A run reads the manifest of its data set many times: for defaults, task, loaders and evaluations. A
read from a store starts a program for 0.2 s, and decoding 100,000 shards takes another second. The
memo also keeps one version of the file for the whole run. Commands that copy or repair do not use
it, so they always read the current file. Torch-free.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from tokenfeed.pipeline.format.store import Store

__all__ = ["once", "read_once", "reading_once"]

T = TypeVar("T")
_kept: ContextVar[dict[Hashable, Any] | None] = ContextVar("kept", default=None)


@contextmanager
def reading_once() -> Iterator[None]:
    """Keep what this thread reads until the end of the outermost block."""
    if _kept.get() is not None:
        yield
        return
    before = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(before)


def once(what: Hashable, read: Callable[[], T]) -> T:
    """Return the result of `read`, or the kept result for the same `what`. Errors are not kept.

    Args:
        what: Key of the result, such as (store, name). Without a hash, nothing is kept.
        read: Reads the value.
    """
    kept = _kept.get()
    if kept is None or not _has_hash(what):
        return read()
    if what not in kept:
        kept[what] = read()
    found: T = kept[what]
    return found


def read_once(store: Store, name: str) -> bytes:
    """Return the bytes of a small file."""
    return once((store, name), partial(store.read, name))


def _has_hash(what: Hashable) -> bool:
    try:
        hash(what)
    except TypeError:
        return False
    return True
