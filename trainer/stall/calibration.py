"""When to hold the device up for a moment, so that the host gets ahead of it.

What follows such a spin finds all its kernels queued: that is how long the work takes by itself.
The steps of a spin train like all others, and are left out of the accounts.
"""

__all__ = ["Calibration"]

_FIRST_STEP = 3
_MOST_SHARE = 0.005
"""Of the time, at most, that spins take."""
_WORTH_SHARE = 0.005
"""Less of the time that may be idle is not worth a spin."""
_MARGIN = 1.2
_LEAST_SECONDS = 2e-4
_MOST_SECONDS = 0.5


class Calibration:
    """Says before which stretch of which step to spin, and for how long."""

    def __init__(self, skipped_steps: int) -> None:
        self._warmup = skipped_steps
        self._steps = 0
        self._openings = self._openings_before = 0
        self._host_seconds = 0.0
        self._opened: float | None = None
        self._budget = 0.0
        self._stepped: float | None = None
        self._target: int | None = None
        """Before which stretch of the step; None: before each."""
        self._spins = 0
        self.is_due = False
        """Whether this step has a spin."""

    def open(self, now: float) -> float:
        """A stretch of work begins: for how long to spin before, mostly 0."""
        number, self._openings = self._openings, self._openings + 1
        self._opened = now
        return self.seconds if self.is_due and self._target in (None, number) else 0.0

    def close(self, now: float) -> None:
        """It ends."""
        if self._opened is not None:
            taken = now - self._opened
            self._host_seconds = min(max(taken, 0.7 * self._host_seconds), 10 * _MOST_SECONDS)
            self._opened = None

    @property
    def seconds(self) -> float:
        """Longer than the host takes for a stretch."""
        return min(_MARGIN * self._host_seconds + _LEAST_SECONDS, _MOST_SECONDS)

    def end_step(self, now: float, behind_share: float) -> None:
        """Decide about the next step, from the share of time that may have been idle in work."""
        self.close(now)
        self._steps += 1
        if self._stepped is not None:
            self._budget += _MOST_SHARE * (now - self._stepped)
        self._stepped = now
        self._openings_before, self._openings = self._openings, 0
        self.is_due = self._decide(behind_share)
        is_free = self._steps < self._warmup
        self._target = None if is_free else self._spins % max(1, self._openings_before)
        self._spins += self.is_due and not is_free

    def _decide(self, behind_share: float) -> bool:
        if self._steps < self._warmup:
            return self._steps + 1 >= _FIRST_STEP
        if behind_share < _WORTH_SHARE or self._budget < self.seconds:
            return False
        self._budget -= self.seconds
        return True
