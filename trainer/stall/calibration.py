"""Calibration delays the device briefly now and then, so that the host gets ahead of the device.

A spin is a kernel that does nothing for a while. Behind a spin, all kernels of a span are queued
before the device starts the span. So the span takes as long as the device needs for it, without
idle time: it becomes a reference. Steps with a spin train like all others. The spin itself is left
out of the accounts.

Steps are chosen by their number: every 2^n-th step has a spin. So all ranks spin in the same
steps and wait for each other once, instead of one after another.

Example: the host takes 50 ms to queue a span, and a step takes 200 ms. A spin takes 1.2 * 50 ms +
0.2 ms = 60.2 ms. To stay below 0.3 % of the time, there must be 60.2 / (0.003 * 200) = 100.3 steps
between spins. The next power of two is 128.
"""

_FIRST_STEP = 3
_MOST_SHARE = 0.003
"""Share of the time that one rank's spins may take. The spins of all ranks take less than 0.5 %."""
_WORTH_SHARE = 0.005
"""Spins stop while less than this share of the time may be idle unseen."""
_MARGIN = 1.2
"""Length of a spin, divided by the time that the host takes to queue a span."""
_LEAST_SECONDS = 2e-4
_MOST_SECONDS = 0.5


class Calibration:
    """Chooses the spans of work to spin before, and the length of the spins."""

    def __init__(self, skipped_steps: int) -> None:
        self._warmup = skipped_steps
        self._steps = 0
        self._openings = 0
        """Spans that began in this step."""
        self._longest = 0.0
        """Host seconds of the longest of these spans."""
        self._host_seconds = 0.0
        """Host seconds of the longest span in the latest step without a spin. It may contain
        waits."""
        self._opened: float | None = None
        self._stepped: float | None = None
        self._step_seconds = 0.0
        """Usual seconds of a step, a moving average."""
        self._target: int | None = None
        """Number of the span in this step to spin before; None for every span."""
        self.is_due = False
        """Whether this step has a spin."""
        self._examined: int | None = None
        """Number of steps that were examined for waits before this one; None if this one is
        not."""
        self._parts: dict[int, float] = {}
        """Host seconds of each part of the first examined step, which has no spins."""

    def open(self, now: float) -> float:
        """Return the seconds to spin before the span that begins now. Usually 0."""
        number, self._openings = self._openings, self._openings + 1
        self._opened = now
        if self._examined is not None:
            host = self._parts.get(number, self._host_seconds)
            return min(_MARGIN * host + _LEAST_SECONDS, _MOST_SECONDS) if self._examined else 0.0
        return self._spin_seconds if self.is_due and self._target in (None, number) else 0.0

    def close(self, now: float) -> None:
        """Record the end of a span."""
        if self._opened is not None:
            if self._examined == 0:
                self._parts[self._openings - 1] = now - self._opened
            self._longest, self._opened = max(self._longest, now - self._opened), None

    def end_step(self, now: float, behind_share: float, examined: int | None = None) -> None:
        """Decide whether to delay the device in the next step, and before which span.

        Args:
            now: Host time.
            behind_share: Share of the time in which the device may have been idle unseen.
            examined: Number of steps examined for waits so far, if the next step is examined. The
                first one has no spins; the others have one before each part between waits.
        """
        self.close(now)
        self._steps += 1
        if self._stepped is not None and self._examined is None:  # the first step is not typical
            self._learn(now - self._stepped)
        self._examined = examined
        openings, self._stepped, self._openings, self._longest = self._openings, now, 0, 0.0
        if self._steps < self._warmup:
            self._target, self.is_due = None, self._steps + 1 >= _FIRST_STEP
            return
        period = self._period()
        self.is_due = behind_share >= _WORTH_SHARE and self._steps % period == 0
        self._target = self._steps // period % max(1, openings)

    @property
    def _spin_seconds(self) -> float:
        """Length of a spin: somewhat longer than the host takes to queue a span."""
        return min(_MARGIN * self._host_seconds + _LEAST_SECONDS, _MOST_SECONDS)

    def _learn(self, seconds: float) -> None:
        """Update the averages after a step. A step that took much longer than usual counts
        little."""
        known = self._step_seconds or seconds
        self._step_seconds = known + 0.1 * (min(seconds, 2 * known) - known)
        if not self.is_due:
            self._host_seconds = min(self._longest, 2 * (self._host_seconds or self._longest))

    def _period(self) -> int:
        """Return the number of steps from spin to spin, a power of two."""
        steps, period = self._spin_seconds / (_MOST_SHARE * max(self._step_seconds, 1e-9)), 1
        while period < steps:
            period *= 2
        return period
