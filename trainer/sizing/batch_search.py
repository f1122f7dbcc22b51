"""Find the largest micro-batch that fits into memory, in at most four trials.

Peak memory is a constant plus a number of bytes per token. Two small trials measure both. A third
tries the largest size that should fit. A fourth corrects the size if memory grew faster.

Example: the limit is 10 GB. 1,000 tokens take 2 GB and 2,000 tokens take 3 GB, so 9,000 tokens
    should take 10 GB. If they take 12 GB, the line from 2,000 to 9,000 tokens, 9 GB for 7,000
    tokens, puts the limit at 7,444 tokens. The fourth trial takes the largest size up to that.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

__all__ = ["MOST_RUNS", "SHARE_OF_MEMORY", "largest_fitting"]

MOST_RUNS = 4
SHARE_OF_MEMORY = 0.92
"""Share of the free memory to use. The rest is for gaps between blocks, and for libraries."""
_AFTER_FAILURE = 0.9


def largest_fitting(
    measure: Callable[[int], int | None], sizes: Sequence[int], limit: int, *, least: int = 1
) -> int | None:
    """Return the largest size that was tried and fits; None if no trial fitted.

    Args:
        measure: Tries a size, and returns its peak bytes; None if memory ran out.
        sizes: The possible sizes, ascending.
        limit: The largest number of bytes that fits.
        least: Below this size, bytes grow faster than above, so the small trials start here.
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
        """Return the largest size that should fit, above the best and below all failed ones."""
        if self.best is None:
            return None
        best = self.best
        failed = [size for size in self.bytes if size > best]
        open_ = [size for size in sizes if best < size < min(failed, default=sizes[-1] + 1)]
        estimate = self._estimate(best, failed)
        return max((size for size in open_ if size <= estimate), default=None)

    def _estimate(self, best: int, failed: list[int]) -> float:
        """Return the size at the limit, on the line through two trials."""
        known = sorted((size, found) for size, found in self.bytes.items() if found is not None)
        if len(known) < 2:
            return math.sqrt(best * min(failed)) if failed else math.inf
        around = [pair for pair in known if pair[0] <= best][-1:]
        around += [pair for pair in known if pair[0] > best][:1] or known[-2:-1]
        (one, one_bytes), (other, other_bytes) = around
        slope = max(1e-9, (other_bytes - one_bytes) / (other - one))
        estimate = one + (self._limit - one_bytes) / slope
        out_of_memory = [size for size in failed if self.bytes[size] is None]
        return min([estimate, *(_AFTER_FAILURE * size for size in out_of_memory)])
