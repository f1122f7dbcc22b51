"""Error bars of shares of time: batch means over steps, in bounded memory.

Causes of which every occurrence is seen are left out, with their time: the steps between them are
the sample.

Steps that follow each other are alike, so single steps would promise too narrow a bar. Batches of
many steps are nearly independent; when there are too many, neighbours are merged.
"""

import math
from dataclasses import dataclass, field

from tokenfeed.trainer.stall.causes import COUNTED, Cause

__all__ = ["Batches", "student"]

_MOST = 64
_LEAST = 8


@dataclass(slots=True)
class _Batch:
    steps: int = 0
    seconds: float = 0.0
    idle: dict[Cause, float] = field(default_factory=dict)

    def add(self, steps: int, seconds: float, idle: dict[Cause, float]) -> None:
        self.steps += steps
        self.seconds += seconds
        for cause, part in idle.items():
            self.idle[cause] = self.idle.get(cause, 0.0) + part

    def of(self, cause: Cause | None) -> float:
        return sum(self.idle.values()) if cause is None else self.idle.get(cause, 0.0)


class Batches:
    """Sums of seconds and idle seconds over batches of steps."""

    def __init__(self) -> None:
        self._size = 1
        self._batches: list[_Batch] = []

    def add(self, seconds: float, idle: dict[Cause, float]) -> None:
        """Add a step."""
        seconds -= sum(part for cause, part in idle.items() if cause in COUNTED)
        idle = {cause: part for cause, part in idle.items() if cause not in COUNTED}
        if not self._batches or self._batches[-1].steps >= self._size:
            self._batches.append(_Batch())
        self._batches[-1].add(1, seconds, idle)
        if len(self._batches) > _MOST:
            self._merge()

    def half_width(self, cause: Cause | None) -> float | None:
        """Return half of the interval that holds the share of a cause, or of all of them, in 95 of
        100 runs, as a share of the time less that of counted causes. None for few steps."""
        count = len(self._batches)
        if count < _LEAST:
            return None
        total = sum(batch.seconds for batch in self._batches) or 1.0
        share = sum(batch.of(cause) for batch in self._batches) / total
        squares = sum((batch.of(cause) - share * batch.seconds) ** 2 for batch in self._batches)
        return student(count - 1) * math.sqrt(count / (count - 1) * squares) / total

    def _merge(self) -> None:
        self._size *= 2
        pairs = zip(self._batches[::2], [*self._batches[1::2], None], strict=False)
        merged = []
        for first, second in pairs:
            if second is not None:
                first.add(second.steps, second.seconds, second.idle)
            merged.append(first)
        self._batches = merged


def student(freedom: float) -> float:
    """Student's 97.5 % quantile, by the expansion of Cornish and Fisher."""
    return 1.96 + 2.372 / freedom + 2.823 / freedom**2
