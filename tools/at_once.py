"""Do something for many things, a few at the same time: for what waits more than it computes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenfeed.pipeline.remote.client import without_patience

__all__ = ["few_threads", "results_of"]

T = TypeVar("T")
R = TypeVar("R")
_SUBMITTED = 10_000
"""Things that are handed to the threads together: each takes memory until its turn."""


@contextlib.contextmanager
def few_threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that have ended afterwards; after an error, and after Ctrl-C, they begin nothing more
    and ask no store again."""
    threads = ThreadPoolExecutor(number)
    try:
        yield threads
    except BaseException:
        with without_patience():
            threads.shutdown(cancel_futures=True)
        raise
    threads.shutdown()


def results_of(do: Callable[[T], R], things: Sequence[T], at_once: int) -> Iterator[R]:
    """What `do` makes of each, in their order; errors and Ctrl-C as of `few_threads`."""
    with few_threads(at_once) as threads:
        for first in range(0, len(things), _SUBMITTED):
            yield from threads.map(do, things[first : first + _SUBMITTED])
