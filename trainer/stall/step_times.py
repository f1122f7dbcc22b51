"""How long steps take: of the run, and since somebody asked."""

from collections import deque
from dataclasses import dataclass

from tokenfeed.trainer.stall.histogram import Histogram

__all__ = ["StepSeconds", "StepTimes"]

_LATEST = 4096


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Of some steps."""

    p50: float
    max: float


class StepTimes:
    """Takes the seconds of one step after the other."""

    def __init__(self) -> None:
        self.all = Histogram()
        self._latest: deque[float] = deque(maxlen=_LATEST)

    def add(self, seconds: float) -> None:
        """One step more."""
        self.all.add(seconds)
        self._latest.append(seconds)

    def take(self) -> StepSeconds | None:
        """Of the steps since this was asked before, the latest thousands at most; None of none."""
        seconds, self._latest = sorted(self._latest), deque(maxlen=_LATEST)
        return StepSeconds(seconds[len(seconds) // 2], seconds[-1]) if seconds else None
