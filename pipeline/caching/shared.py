"""Pieces of data that all processes of a node need, each of them fetched by one."""

import random
import time
from collections.abc import Callable
from functools import partial

from tokenfeed.pipeline.caching.node import Node
from tokenfeed.pipeline.caching.node_cache import CacheSet, read_file
from tokenfeed.pipeline.caching.store import Fetched

__all__ = ["SharedPieces"]

Fetch = Callable[[int], bytes]

_LOOK_AGAIN_S = 0.005
_PATIENCE_S = 60.0
"""So long the process that fetches a piece is waited for. One that was stopped keeps its lock."""


class SharedPieces:
    """Numbered pieces of one kind: what the cache has, or what is fetched and then kept there."""

    def __init__(
        self, node: Node, files: CacheSet | None, path: Callable[[int], str], first_lock: int = 0
    ) -> None:
        """
        Args:
            node: The threads and counts of this process.
            files: The cache; None where nothing is kept.
            path: Where the cache has a piece.
            first_lock: The lock of piece 0.
        """
        self._node = node
        self._files = files
        self._path = path
        self._first_lock = first_lock

    def get(self, numbers: list[int], fetch: Fetch) -> dict[int, bytes]:
        """Some pieces; errors are those of `fetch`, which is called in several threads.

        Processes that want the same pieces begin at different ones, and so share the work.
        """
        got = {number: kept for number in numbers if (kept := self._kept(number)) is not None}
        self._node.count(Fetched(hits=len(got)))
        if missing := [number for number in dict.fromkeys(numbers) if number not in got]:
            first = random.randrange(len(missing))
            self._fetch_all(missing[first:] + missing[:first], fetch, got)
        return got

    def again(self, number: int, fetch: Fetch) -> bytes:
        """A piece from the store, for the one in the cache is damaged, or came so."""
        self._node.count(Fetched(damaged=1))
        data = fetch(number)
        self.replace(number, data)
        return data

    def replace(self, number: int, data: bytes) -> None:
        """Have the cache hold this piece in place of the one that it has."""
        if self._files:
            self._files.remove(self._path(number))
            self._files.write(self._path(number), data)

    def _fetch_all(self, missing: list[int], fetch: Fetch, got: dict[int, bytes]) -> None:
        patient_until = time.monotonic() + _PATIENCE_S
        while missing:
            one = partial(self._one, fetch, time.monotonic() < patient_until)
            found = self._node.threads.map(one, missing)
            pairs = zip(missing, found, strict=True)
            got.update((number, piece) for number, piece in pairs if piece is not None)
            missing = [number for number in missing if number not in got]
            if missing:
                time.sleep(_LOOK_AGAIN_S)

    def _one(self, fetch: Fetch, is_patient: bool, number: int) -> bytes | None:
        """A piece; None where another process is fetching it."""
        if self._files is None:
            return fetch(number)
        with self._files.lock(self._first_lock + number) as is_mine:
            if (kept := self._kept(number)) is not None:
                return kept
            if not is_mine and is_patient:
                return None
            data = fetch(number)
            self._files.write(self._path(number), data)
            return data

    def _kept(self, number: int) -> bytes | None:
        return read_file(self._path(number)) if self._files else None
