"""Host time of a device's time, from bounds alone: nothing waits to compare the two clocks.

A device passes no mark before the host has queued it, nor before the host last saw that it had not
passed. So each mark gives a host time before which the device did not pass it. The best bound is
carried from mark to mark by the device's clock, less the most that the clocks may drift apart.

Example: a mark is queued at host time 5.000 on an empty queue, and the device's clock shows 90.0.
A mark is queued at 5.001 behind a kernel of one second, and the device passes it at 91.0. It passed
no earlier than 5.9998, so the host had queued it 0.9988 s ahead.
"""

__all__ = ["ClockMap"]

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
