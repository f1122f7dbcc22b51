"""Fetching windows before they are wanted, along the plan."""

import threading
from collections.abc import Callable
from itertools import islice

import numpy as np

from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.pipeline.planning.ahead import Ahead
from tokenfeed.pipeline.planning.plan import Position

__all__ = ["Prefetcher"]


class Prefetcher:
    """A thread that keeps some windows ahead of the one that was read last.

    All processes of a node do so for the same windows: what one of them fetches, the others skip.
    """

    def __init__(self, fetch: Callable[[np.ndarray], None], num_windows: int) -> None:
        """
        Args:
            fetch: Puts the record batches of a window into the cache.
            num_windows: How many windows ahead.
        """
        self._fetch = fetch
        self._num_windows = num_windows
        self._changed = threading.Condition()
        self._ahead: Ahead | None = None
        self._done: Position | None = None
        threading.Thread(target=self._run, name="tokenfeed prefetches", daemon=True).start()

    def follow(self, ahead: Ahead) -> None:
        """Say which window was read last."""
        with self._changed:
            if self._ahead and ahead.position < self._ahead.position:
                self._done = None  # it begins anew from there
            self._ahead = ahead
            self._changed.notify()

    def _run(self) -> None:
        seen: Ahead | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ahead is not seen)  # noqa: B023
                seen = self._ahead
            assert seen
            self._fetch_after(seen)

    def _fetch_after(self, ahead: Ahead) -> None:
        for position in islice(ahead.windows(), self._num_windows):
            if self._ahead is not ahead:
                return
            if self._done is None or self._done < position:
                try:
                    self._fetch(ahead.batches(position))
                except (OSError, TokenfeedError):
                    return  # whoever waits for it will be told
                self._done = position
