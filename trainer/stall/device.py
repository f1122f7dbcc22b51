"""The device of a meter: its name, peak rate, energy and memory, and its clock.

All figures are optional. If a driver or a build of torch does not provide a figure, the report
leaves it out, and training continues. Torch is imported when a meter is made.

Comparing the clocks of device and host must not wait for the device. The device cannot pass a mark
before the host has queued it, nor before the latest time at which the host saw that it had not
passed. So each mark gives a lower bound of the host time at which it was passed. A bound is carried
on to later marks by the device's clock, less the most that the clocks may drift apart. The best
bound so far counts.

Example: mark A is queued at host time 5.000 on an empty queue, and the device's clock shows 90.0
when it passes. Mark B is queued at 5.001 behind a kernel of one second, and the device passes it at
91.0 of its clock. Carried from A: 5.000 + 1.0 * (1 - 0.0002) = 5.9998. This is later than 5.001, so
it counts: the device passed B no earlier than 5.9998, and the host had queued B 0.9988 s before.
"""

import platform
import re
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


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


class Clock:
    """Queues marks among a device's work, and measures the time between them.

    This is the clock of a CPU: the host does the work itself, so host time is device time.
    Subclasses are clocks of devices that work beside the host. Marks are of any type.
    """

    method = (
        "stall on a CPU is the time that the training thread spends outside of its steps, by the "
        "host's clock"
    )
    """One sentence for the report: what is measured, and how."""
    is_beside_host = False
    """Whether the device works in parallel with the host."""

    def now(self) -> float:
        """Return the host time."""
        return time.perf_counter()

    def mark(self) -> tuple[Any, float, float]:
        """Queue a mark behind all work queued so far; return it with host time before and after."""
        now = time.perf_counter()
        return now, now, now

    def passed(self, mark: Any) -> bool:
        """Return whether the device has reached the mark. Never waits."""
        return True

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the device time between two neighbouring marks that it has passed."""
        return float(later - earlier)

    def recycle(self, mark: Any) -> None:
        """Take back a mark that is no longer used."""

    def spin(self, seconds: float) -> bool:
        """Queue about this many seconds of useless work; return False if the device cannot."""
        return False

    def takes_marks(self) -> bool:
        """Return whether a mark may be queued now, at any place of the program."""
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


class MeteredDevice:
    """The device that a meter measures.

    Args:
        device: None for the first accelerator, or the CPU without one.
        operations_per_token: Floating-point operations per token, for the MFU.
        devices: Number of devices that share the tokens of the loop.
        clock: A clock that belongs to no device of torch. Then `device` is ignored.
    """

    def __init__(
        self,
        device: "torch.device | str | None",
        operations_per_token: float | None,
        devices: int,
        clock: Clock | None,
    ) -> None:
        self.operations_per_token = operations_per_token and operations_per_token / devices
        self.on_gpu = False
        """Whether the device is an accelerator of torch."""
        self.name = f"CPU, {platform.machine()}"
        """The product name."""
        self.clock = clock or Clock()
        self.allocator_statistics: Callable[[], dict[str, Any]] | None = None
        """Returns the statistics of torch's allocator; None without one."""
        if clock is None:
            self._find(device)

    def _find(self, device: "torch.device | str | None") -> None:
        from tokenfeed.pipeline.feeding.devices import cuda, default_device, resolve_device

        found = default_device() if device is None else resolve_device(device)
        if found.type == "cpu":
            return
        self.on_gpu, self.clock = True, EventClock(found)
        self.name = cuda.get_device_name(found)
        self.allocator_statistics = partial(cuda.memory_stats_as_nested_dict, found)

    @property
    def peak_tflops(self) -> float | None:
        """Peak rate of dense arithmetic in half precision; None if unknown."""
        return peak_tflops(self.name) if self.on_gpu else None


PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100": 989,
    "H100-NVL": 835,
    "H100-PCIe": 756,
    "A100": 312,
    "L40S": 362,
    "A40": 149.7,
    "A6000": 154.8,
    "L4": 121,
    "RTX-5090": 209.5,
    "RTX-4090": 165.2,
    "RTX-3090": 71,
    "V100": 125,
    "T4": 65,
}
"""TFLOP/s by the words of a model's name. They are from the vendors' data sheets for dense matrix
products in half precision, as torchtitan, nanochat and llm.c use them for their MFU. A GPU in a
small case or with a lower power limit is slower."""


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a GPU by its driver's name; None if unknown."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    same = [model for model in PEAK_TFLOPS if words.issuperset(model.split("-"))]
    closest = max(same, key=lambda model: model.count("-"), default="")
    return PEAK_TFLOPS.get(closest)


_CYCLES_PER_S = 1.5e9
"""Approximate clock rate of GPUs. Spins are requested with a margin, and their length is
measured."""


class EventClock(Clock):
    """The clock of a GPU. Events are pooled, and polled with `query`; nothing waits for them.

    An elapsed time is a 32-bit float of milliseconds. Only short times are exact to microseconds,
    so times are read between neighbouring events.
    """

    method = (
        "GPU events: between events around code that queues no work of the training, all time is "
        "idle; inside the work, idle time is the time "
        "by which steps take longer than steps that the host had queued before they began"
    )
    is_beside_host = True

    def __init__(self, device: "torch.device") -> None:
        from tokenfeed.pipeline.feeding.devices import cuda

        self._device = device
        """The device of the events. Loops may use several devices and switch the current one."""
        self._cuda = cuda
        self._new_event = partial(cuda.Event, enable_timing=True)
        self._pool: list[torch.Event] = []

    def mark(self) -> "tuple[torch.Event, float, float]":
        """Record an event on the device's current stream."""
        event = self._pool.pop() if self._pool else self._new_event()
        stream = self._cuda.current_stream(self._device)
        before = time.perf_counter()
        event.record(stream)
        return event, before, time.perf_counter()

    def passed(self, mark: "torch.Event") -> bool:
        """Return whether the event has occurred."""
        return bool(mark.query())

    def seconds(self, earlier: "torch.Event", later: "torch.Event") -> float:
        """Return the GPU time between two events."""
        return float(earlier.elapsed_time(later)) / 1e3

    def recycle(self, mark: "torch.Event") -> None:
        """Keep the event for a later mark."""
        self._pool.append(mark)

    def spin(self, seconds: float) -> bool:
        """Queue a kernel that counts cycles: a private function of torch, which may be missing."""
        try:
            with self._cuda.device(self._device):
                self._cuda._sleep(int(seconds * _CYCLES_PER_S))
        except (AttributeError, RuntimeError):  # a build of torch without it
            return False
        return True

    def takes_marks(self) -> bool:
        """Return False while a CUDA graph is captured: the event would become a part of the
        graph."""
        with self._cuda.device(self._device):
            return not self._cuda.is_current_stream_capturing()
