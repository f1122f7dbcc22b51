"""Host time of a device's time: two clocks of unlike speed, and no wait to compare them.

A device passes no mark before the host has queued it, so the host's time of a mark, as a line of
the device's, lies above `before` at every mark. The lowest such line touches the marks that met an
empty queue. It is early by the latency of a launch: a kernel that is queued at t starts at t on it.
Where the queue was never empty it is earlier still, so a lead of the host is never overstated.
"""

from collections import deque

__all__ = ["ClockMap", "lowest_line_above"]

_BLOCK_SECONDS = 0.25
_BLOCKS = 64
"""Older marks are forgotten: clocks drift by some millionths, and not evenly."""
_MOST_DRIFT = 1e-4

Point = tuple[float, float]


class ClockMap:
    """The line through the latest marks: `difference` is host time minus device time."""

    def __init__(self) -> None:
        self._slope = 0.0
        self._offset = float("-inf")
        self._block = -1
        self._points: deque[Point] = deque(maxlen=_BLOCKS)

    def add(self, device: float, before: float) -> None:
        """Learn from a mark."""
        difference = before - device
        block = int(device / _BLOCK_SECONDS)
        if block != self._block:
            self._block = block
            self._refit()
            self._points.append((device, difference))
        elif difference > self._points[-1][1]:
            self._points[-1] = (device, difference)
        self._offset = max(self._offset, difference - self._slope * device)

    def host(self, device: float) -> float:
        """Host time at which the device passed, at the earliest."""
        return device + self._offset + self._slope * device

    def _refit(self) -> None:
        if len(self._points) > 2:
            self._slope, self._offset = lowest_line_above(list(self._points))


def lowest_line_above(points: list[Point]) -> tuple[float, float]:
    """Slope and offset of the line above all points that is closest to them in sum, drifting no
    faster than clocks do; `points` have ascending first coordinates."""
    hull: list[Point] = []
    for point in points:
        while len(hull) > 1 and _slope(hull[-2], point) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    mean = sum(x for x, _ in points) / len(points)
    left = max(i for i, (x, _) in enumerate(hull[:-1]) if x <= mean)
    slope = min(max(_slope(hull[left], hull[left + 1]), -_MOST_DRIFT), _MOST_DRIFT)
    return slope, max(y - slope * x for x, y in points)


def _slope(a: Point, b: Point) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
