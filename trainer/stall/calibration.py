"""When to hold the device up for a moment, so that the host gets ahead of it.

All kernels of the work behind such a spin are queued before the device begins: that is how long the
work takes by itself. The steps of a spin train like all others, and are left out of the accounts.

The steps are chosen by their number: spins come every 2^n steps. If several ranks spin, they do so
in the same steps, and wait for each other once and not by turns.
"""

__all__ = ["Calibration"]

_FIRST_STEP = 3
_MOST_SHARE = 0.003
"""Share of the time that the spins of a rank may take; those of all ranks take less than 0.5 %."""
_WORTH_SHARE = 0.005
"""Less of the time that may be idle is not worth a spin."""
_MARGIN = 1.2
_LEAST_SECONDS = 2e-4
_MOST_SECONDS = 0.5


class Calibration:
    """Chooses the stretches of work to spin before, and for how long."""

    def __init__(self, skipped_steps: int) -> None:
        self._warmup = skipped_steps
        self._steps = 0
        self._openings = 0
        """Stretches that began in this step."""
        self._longest = 0.0
        """What the host took for the longest of them."""
        self._host_seconds = 0.0
        """The same in the latest step without a spin, in which the host may wait."""
        self._opened: float | None = None
        self._stepped: float | None = None
        self._step_seconds = 0.0
        """What a step takes on average."""
        self._target: int | None = None
        """The stretch of this step to spin before; None for each."""
        self.is_due = False
        """Whether this step has a spin."""

    def open(self, now: float) -> float:
        """Return the seconds to spin before the stretch that begins: mostly 0."""
        number, self._openings = self._openings, self._openings + 1
        self._opened = now
        return self._spin_seconds if self.is_due and self._target in (None, number) else 0.0

    def close(self, now: float) -> None:
        """Note the end of a stretch."""
        if self._opened is not None:
            self._longest, self._opened = max(self._longest, now - self._opened), None

    def end_step(self, now: float, behind_share: float) -> None:
        """Decide about the next step, from the share of time that may have been idle in work."""
        self.close(now)
        self._steps += 1
        if self._stepped is not None:  # not in the first step, which is no measure of others
            self._learn(now - self._stepped)
        openings, self._stepped, self._openings, self._longest = self._openings, now, 0, 0.0
        if self._steps < self._warmup:
            self._target, self.is_due = None, self._steps + 1 >= _FIRST_STEP
            return
        period = self._period()
        self.is_due = behind_share >= _WORTH_SHARE and self._steps % period == 0
        self._target = self._steps // period % max(1, openings)

    @property
    def _spin_seconds(self) -> float:
        """Somewhat longer than the host takes for a stretch."""
        return min(_MARGIN * self._host_seconds + _LEAST_SECONDS, _MOST_SECONDS)

    def _learn(self, seconds: float) -> None:
        """Learn from a step; one that took much longer than usual counts little."""
        known = self._step_seconds or seconds
        self._step_seconds = known + 0.1 * (min(seconds, 2 * known) - known)
        if not self.is_due:
            self._host_seconds = min(self._longest, 2 * (self._host_seconds or self._longest))

    def _period(self) -> int:
        """Return the steps from spin to spin, a power of two."""
        steps, period = self._spin_seconds / (_MOST_SHARE * max(self._step_seconds, 1e-9)), 1
        while period < steps:
            period *= 2
        return period
