"""num_workers="auto": measure how many workers keep up with the loop.

A worker makes a window in d seconds, and the loop uses one in c seconds (without waiting), so d / c
workers keep up. Time waiting for a core is not part of d, because more workers would increase it.
The order does not depend on the number of workers, so it can change at any time. Pure: measurements
in, a number out.
"""

import statistics
from collections import deque
from math import ceil

__all__ = ["Tuner"]

_HEADROOM = 1.25  # a worker more than needed costs memory; one too few costs the GPU
_DEAD_BAND = 0.75  # workers leave when even fewer than this share of them would do
_EVERY = 4  # windows between changes: the ones in the queue were made by the former number
_KEPT = 8


class Tuner:
    """Suggests a number of workers after each window."""

    def __init__(self, most: int) -> None:
        """`most` workers at the most: this rank's share of the cores."""
        self._most = most
        self._made_s: deque[float] = deque(maxlen=_KEPT)
        self._used_s: deque[float] = deque(maxlen=_KEPT)
        self._until_change = _EVERY

    def add(self, made_s: float, used_s: float) -> None:
        """Count one window: seconds it took a worker, seconds it lasted the loop without waits."""
        self._made_s.append(made_s)
        self._used_s.append(used_s)
        self._until_change -= 1

    def suggest(self, num_workers: int) -> int:
        """How many workers there should be, where there are `num_workers`."""
        if self._until_change > 0:
            return num_workers
        self._until_change = _EVERY
        made, used = statistics.median(self._made_s), statistics.median(self._used_s)
        wanted = made * _HEADROOM / max(used, 1e-9)
        needed = max(1, min(ceil(min(wanted, self._most)), self._most))
        if _DEAD_BAND * (num_workers - 1) < wanted < num_workers:
            return min(num_workers, self._most)  # one less might do: no coming and going
        return needed
