"""Do something for many things, a few at the same time: for what waits more than it computes."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenfeed.pipeline.remote.client import without_patience

__all__ = ["results_of"]

T = TypeVar("T")
R = TypeVar("R")
_SUBMITTED = 10_000
"""Things that are handed to the threads together: each takes memory until its turn."""


def results_of(do: Callable[[T], R], things: Sequence[T], at_once: int) -> Iterator[R]:
    """What `do` makes of each, in their order; after an error, and after Ctrl-C, no more are begun
    and no store is asked again."""
    with ThreadPoolExecutor(at_once) as threads:
        try:
            for first in range(0, len(things), _SUBMITTED):
                yield from threads.map(do, things[first : first + _SUBMITTED])
        except BaseException:
            with without_patience():
                threads.shutdown(cancel_futures=True)
            raise
