"""The clock of a device, and the host time at which the device passed a mark.

Nothing waits to compare the two clocks. A device passes no mark before the host has queued it, nor
before the host last saw that it had not passed. So each mark gives a host time before which the
device did not pass it. The best bound is carried from mark to mark by the device's clock, less the
most that the clocks may drift apart.

Example: a mark is queued at host time 5.000 on an empty queue, and the device's clock shows 90.0.
A mark is queued at 5.001 behind a kernel of one second, and the device passes it at 91.0. It passed
no earlier than 5.9998, so the host had queued it 0.9988 s ahead.
"""

import time
from typing import NamedTuple, Protocol, TypeVar

__all__ = ["Clock", "ClockMap", "HostClock", "Moment"]

Mark = TypeVar("Mark")


class Moment(NamedTuple):
    """A mark that the device has passed, in seconds."""

    device: float
    """Device time since the first mark."""
    earliest: float
    """Host time before which the device did not pass it: the mark was not queued yet, or the
    device was asked and had not passed it."""
    after: float
    """Host time just after it was queued: all work before it is queued by then."""
    taken: float
    """Host seconds to queue it."""


class Clock(Protocol[Mark]):
    """Puts marks into the device's queue of work, and tells the time between them."""

    method: str
    """One sentence for the report: what is measured, and how."""
    is_beside_host: bool
    """Whether the device works on while the host does something else."""

    def now(self) -> float:
        """Host time."""
        ...

    def mark(self) -> tuple[Mark, float, float]:
        """Queue a mark behind all work queued so far; with host time before and after."""
        ...

    def passed(self, mark: Mark) -> bool:
        """Whether the device has reached the mark; never waits for it."""
        ...

    def seconds(self, earlier: Mark, later: Mark) -> float:
        """Device time between two neighbouring marks that it has passed."""
        ...

    def recycle(self, mark: Mark) -> None:
        """Take back a mark that will not be asked about again."""
        ...

    def spin(self, seconds: float) -> bool:
        """Queue about so many seconds of work that is good for nothing; False where none can be."""
        ...

    def takes_marks(self) -> bool:
        """Whether a mark may be queued just now, from any place of the program."""
        ...


class HostClock:
    """The clock of a CPU: the host does the work itself, so its time is the device's time."""

    method = (
        "stall on a CPU is the time that the training thread spends outside of its steps, by the "
        "host's clock"
    )
    is_beside_host = False

    def now(self) -> float:
        """The time now."""
        return time.perf_counter()

    def mark(self) -> tuple[float, float, float]:
        """The time now."""
        now = time.perf_counter()
        return now, now, now

    def passed(self, mark: float) -> bool:
        """Always: what the host has queued, it has done."""
        return True

    def seconds(self, earlier: float, later: float) -> float:
        """The difference."""
        return later - earlier

    def recycle(self, mark: float) -> None:
        """Nothing to take back."""

    def spin(self, seconds: float) -> bool:
        """Never: the host would only lose time."""
        return False

    def takes_marks(self) -> bool:
        """Always."""
        return True


_MOST_DRIFT = 2e-4
"""Twice what crystals differ by. A larger value costs 1 µs of lead for each 10 ms of full queue."""


class ClockMap:
    """The earliest host time at which the device can have passed its latest mark."""

    def __init__(self) -> None:
        self._device = 0.0
        self._host = float("-inf")

    def add(self, device: float, earliest: float) -> float:
        """Return the host time before which the device did not pass a mark.

        Args:
            device: Device time of the mark, not before that of the mark before.
            earliest: Host time before which the device did not pass it, by the host's own account.
        """
        carried = self._host + (device - self._device) * (1 - _MOST_DRIFT)
        self._device, self._host = device, max(earliest, carried)
        return self._host
