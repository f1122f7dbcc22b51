"""Percentiles of seconds in little memory: counts by logarithm, some percent wide."""

import math
from collections import Counter

__all__ = ["Histogram"]

_LEAST = 1e-7
_WIDTH = math.log(1.04)


class Histogram:
    """Values of at least 0, kept to within 2 %; the largest is kept as it is."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._zeros = 0
        self.largest = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        if value <= _LEAST:
            self._zeros += 1
            return
        self._counts[int(math.log(value / _LEAST) / _WIDTH)] += 1
        self.largest = max(self.largest, value)

    def quantile(self, share: float, total: int) -> float:
        """The value that `share` of `total` values do not exceed; those never added are 0."""
        left = share * total - (total - self._counts.total())
        if left <= 0:
            return 0.0
        for bin_number in sorted(self._counts):
            left -= self._counts[bin_number]
            if left <= 0:
                return min(self.largest, _LEAST * math.exp((bin_number + 0.5) * _WIDTH))
        return self.largest
