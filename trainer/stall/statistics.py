"""Percentiles of seconds, seconds per step, and error bars of shares, in bounded memory.

Error bars come from batch means. Neighbouring steps are alike, so the spread of single steps would
promise too narrow a bar. The means of batches of many steps are nearly independent. When there are
too many batches, neighbours are merged. Causes whose every occurrence is measured are left
out, with their time: the sample is the steps between these events.

Example: 8 batches take 10 s each, and idle for 1.0, 1.2, 0.8, 1.1, 0.9, 1.0, 1.2 and 0.8 s, which
    is a share of 10 %. The deviations from 1.0 s have 0.18 s² as their sum of squares. With 7
    degrees of freedom, Student's quantile is 2.36. The half-width is 2.36 * √(8/7 * 0.18) / 80 =
    1.3 %.
"""

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from tokenfeed.trainer.stall.causes import COUNTED, Cause

_LEAST_SECONDS = 1e-7
_WIDTH = math.log(1.04)


class Histogram:
    """Counts values of at least 0 in bins 4 % wide, so a quantile is within 2 %. The largest value
    is exact."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._zeros = 0
        self.largest = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        if value <= _LEAST_SECONDS:
            self._zeros += 1
            return
        self._counts[int(math.log(value / _LEAST_SECONDS) / _WIDTH)] += 1
        self.largest = max(self.largest, value)

    def quantile(self, share: float, total: int) -> float:
        """Return the value that `share` of `total` values do not exceed. Values never added are
        0."""
        left = share * total - (total - self._counts.total())
        if left <= 0:
            return 0.0
        for bin_number in sorted(self._counts):
            left -= self._counts[bin_number]
            if left <= 0:
                return min(self.largest, _LEAST_SECONDS * math.exp((bin_number + 0.5) * _WIDTH))
        return self.largest


_MOST_BATCHES = 64
_LEAST_BATCHES = 8


@dataclass(slots=True)
class _Batch:
    steps: int = 0
    seconds: float = 0.0
    idle: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, steps: int, seconds: float, idle: dict[Cause, float]) -> None:
        self.steps += steps
        self.seconds += seconds
        for cause, part in idle.items():
            self.idle[cause] += part

    def of(self, cause: Cause | None) -> float:
        return sum(self.idle.values()) if cause is None else self.idle[cause]


class BatchMeans:
    """Seconds and idle seconds, summed over batches of steps."""

    def __init__(self) -> None:
        self._size = 1
        self.batches: list[_Batch] = []

    def add(self, seconds: float, idle: dict[Cause, float]) -> None:
        """Add a step."""
        seconds -= sum(part for cause, part in idle.items() if cause in COUNTED)
        idle = {cause: part for cause, part in idle.items() if cause not in COUNTED}
        if not self.batches or self.batches[-1].steps >= self._size:
            self.batches.append(_Batch())
        self.batches[-1].add(1, seconds, idle)
        if len(self.batches) > _MOST_BATCHES:
            self._merge()

    def half_width(self, cause: Cause | None) -> float | None:
        """Return the half-width of the 95 % interval of an idle share; None after too few steps.

        Args:
            cause: The cause of the idle time; None for all causes. Counted causes and their time
                are left out (see the module).
        """
        count = len(self.batches)
        if count < _LEAST_BATCHES:
            return None
        total = sum(batch.seconds for batch in self.batches) or 1.0
        share = sum(batch.of(cause) for batch in self.batches) / total
        squares = sum((batch.of(cause) - share * batch.seconds) ** 2 for batch in self.batches)
        return student(count - 1) * math.sqrt(count / (count - 1) * squares) / total

    def _merge(self) -> None:
        # Merge neighbours: twice the steps per batch, half the batches.
        self._size *= 2
        for first, second in zip(self.batches[::2], self.batches[1::2], strict=False):
            first.add(second.steps, second.seconds, second.idle)
        self.batches = self.batches[::2]


def student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's distribution, by the Cornish-Fisher expansion."""
    return 1.96 + 2.372 / freedom + 2.823 / freedom**2


_LATEST = 4096


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Median and maximum of the seconds of some steps."""

    p50: float
    max: float


class StepTimes:
    """Seconds per step."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_LATEST)

    def add(self, seconds: float) -> None:
        """Add a step."""
        self._latest.append(seconds)

    def take(self) -> StepSeconds | None:
        """Return figures of the steps since the last call, at most the latest 4,096; None without
        steps."""
        seconds, self._latest = sorted(self._latest), deque(maxlen=_LATEST)
        return StepSeconds(seconds[len(seconds) // 2], seconds[-1]) if seconds else None
