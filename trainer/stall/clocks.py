"""The clock of a device, and the host time at which the device passed a mark.

Comparing the two clocks must not wait for the device. The device cannot pass a mark before the host
has queued it, nor before the latest time at which the host saw that it had not passed. So each mark
gives a lower bound of the host time at which it was passed. A bound is carried on to later marks by
the device's clock, less the most that the clocks may drift apart. The best bound so far counts.

Example: mark A is queued at host time 5.000 on an empty queue, and the device's clock shows 90.0
when it passes. Mark B is queued at 5.001 behind a kernel of one second, and the device passes it at
91.0 of its clock. Carried from A: 5.000 + 1.0 * (1 - 0.0002) = 5.9998. This is later than 5.001, so
it counts: the device passed B no earlier than 5.9998, and the host had queued B 0.9988 s before.
"""

import time
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

__all__ = ["Clock", "ClockMap", "HostClock", "Moment"]

Mark = TypeVar("Mark")


class Moment(NamedTuple):
    """A mark that the device has passed, in seconds."""

    device: float
    """Seconds of device time since the first mark."""
    earliest: float
    """Host time before which the device did not pass the mark: it was not queued yet, or `passed`
    still returned False."""
    after: float
    """Host time just after the mark was queued. All work before the mark is queued by then."""
    taken: float
    """Host seconds taken to queue the mark."""


@runtime_checkable
class Clock(Protocol[Mark]):
    """Queues marks among a device's work, and measures the time between them."""

    method: str
    """One sentence for the report: what is measured, and how."""
    is_beside_host: bool
    """Whether the device works in parallel with the host."""

    def now(self) -> float:
        """Return the host time."""
        ...

    def mark(self) -> tuple[Mark, float, float]:
        """Queue a mark behind all work queued so far; return it with host time before and after."""
        ...

    def passed(self, mark: Mark) -> bool:
        """Return whether the device has reached the mark. Never waits."""
        ...

    def seconds(self, earlier: Mark, later: Mark) -> float:
        """Return the device time between two neighbouring marks that it has passed."""
        ...

    def recycle(self, mark: Mark) -> None:
        """Take back a mark that is no longer used."""
        ...

    def spin(self, seconds: float) -> bool:
        """Queue about this many seconds of useless work; return False if the device cannot."""
        ...

    def takes_marks(self) -> bool:
        """Return whether a mark may be queued now, at any place of the program."""
        ...


class HostClock:
    """The clock of a CPU. The host does the work itself, so host time is device time."""

    method = (
        "stall on a CPU is the time that the training thread spends outside of its steps, by the "
        "host's clock"
    )
    is_beside_host = False

    def now(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def mark(self) -> tuple[float, float, float]:
        """Return the time."""
        now = time.perf_counter()
        return now, now, now

    def passed(self, mark: float) -> bool:
        """Return True: the host has done what it has queued."""
        return True

    def seconds(self, earlier: float, later: float) -> float:
        """Return the difference."""
        return later - earlier

    def recycle(self, mark: float) -> None:
        """Do nothing."""

    def spin(self, seconds: float) -> bool:
        """Return False: a spin would only cost time."""
        return False

    def takes_marks(self) -> bool:
        """Return True."""
        return True


_MOST_DRIFT = 2e-4
"""Relative drift between two clocks: twice the error of crystals. A larger value costs 1 µs of lead
for each 10 ms of full queue."""


class ClockMap:
    """Maps device time to host time: the earliest host time at which the device passed a mark."""

    def __init__(self) -> None:
        self._device = 0.0
        self._host = float("-inf")

    def add(self, device: float, earliest: float) -> float:
        """Return a host time before which the device did not pass a mark.

        Args:
            device: Device time of the mark. Must not decrease from mark to mark.
            earliest: Host time before which the device did not pass the mark, as the host saw it.
        """
        carried = self._host + (device - self._device) * (1 - _MOST_DRIFT)
        self._device, self._host = device, max(earliest, carried)
        return self._host
