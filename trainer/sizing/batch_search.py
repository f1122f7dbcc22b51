"""The largest micro-batch that memory takes, found in four runs at most.

Peak memory is a constant and a share for each token. Two small runs tell both, a third tries the
largest size that they promise, and a fourth corrects it where memory has grown faster.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

__all__ = ["MOST_RUNS", "SHARE_OF_MEMORY", "largest_fitting"]

MOST_RUNS = 4
SHARE_OF_MEMORY = 0.92
"""Of what is free; the rest is for what allocators lose between blocks, and for libraries."""
_AFTER_FAILURE = 0.9


def largest_fitting(
    measure: Callable[[int], int | None], sizes: Sequence[int], limit: int, *, least: int = 1
) -> int | None:
    """The largest size whose bytes are within the limit, or nearly; None where no run has fitted.

    Args:
        measure: Runs a size: the most bytes it took, or None where there were not enough.
        sizes: Those that are possible, ascending.
        limit: Bytes.
        least: Below this size bytes grow faster than above, so the small runs begin here.
    """
    search = _BatchSearch(measure, limit)
    first = sizes[min(bisect_left(sizes, least), len(sizes) - 1)]
    if search.fits(first):
        search.fits(sizes[min(bisect_left(sizes, 2 * first), len(sizes) - 1)])
    elif first > sizes[0]:
        search.fits(sizes[0])
    while len(search.bytes) < MOST_RUNS:
        guess = search.guess(sizes)
        if guess is None:
            break
        search.fits(guess)
    return search.best


class _BatchSearch:
    def __init__(self, measure: Callable[[int], int | None], limit: int) -> None:
        self._measure, self._limit = measure, limit
        self.bytes: dict[int, int | None] = {}
        self.best: int | None = None

    def fits(self, size: int) -> bool:
        if size in self.bytes:
            return size == self.best
        found = self.bytes[size] = self._measure(size)
        fits = found is not None and found <= self._limit
        if fits:
            self.best = max(size, self.best or 0)
        return fits

    def guess(self, sizes: Sequence[int]) -> int | None:
        """The largest size, between what has fitted and what has not, that earlier runs promise."""
        if self.best is None:
            return None
        best = self.best
        failed = [size for size in self.bytes if size > best]
        open_ = [size for size in sizes if best < size < min(failed, default=sizes[-1] + 1)]
        promised = self._promised(best, failed)
        return max((size for size in open_ if size <= promised), default=None)

    def _promised(self, best: int, failed: list[int]) -> float:
        known = sorted((size, found) for size, found in self.bytes.items() if found is not None)
        if len(known) < 2:
            return math.sqrt(best * min(failed)) if failed else math.inf
        around = [pair for pair in known if pair[0] <= best][-1:]
        around += [pair for pair in known if pair[0] > best][:1] or known[-2:-1]
        (one, one_bytes), (other, other_bytes) = around
        slope = max(1e-9, (other_bytes - one_bytes) / (other - one))
        promised = one + (self._limit - one_bytes) / slope
        out_of_memory = [size for size in failed if self.bytes[size] is None]
        return min([promised, *(_AFTER_FAILURE * size for size in out_of_memory)])
