"""Run a function on many things in a few threads: for work that waits more than it computes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenfeed.pipeline.remote.client import without_patience

__all__ = ["few_threads", "results_of"]

T = TypeVar("T")
R = TypeVar("R")
_SUBMITTED = 10_000
"""Things that are given to the threads together: each takes memory until it is done."""


@contextlib.contextmanager
def few_threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads, which have ended when the block ends.

    After an error or Ctrl-C the threads start nothing more and repeat no request.
    """
    threads = ThreadPoolExecutor(number)
    try:
        yield threads
    except BaseException:
        with without_patience():
            threads.shutdown(cancel_futures=True)
        raise
    threads.shutdown()


def results_of(do: Callable[[T], R], things: Sequence[T], at_once: int) -> Iterator[R]:
    """Yield the result of `do` for each thing, in order; errors and Ctrl-C as in `few_threads`."""
    with few_threads(at_once) as threads:
        for first in range(0, len(things), _SUBMITTED):
            yield from threads.map(do, things[first : first + _SUBMITTED])
