"""The device of a meter: its name and peak rate, its clock, and when to delay it.

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

    def mfu(self, tokens_per_s: float) -> tuple[float | None, str | None]:
        """Return the MFU at a speed, and its formula; None if the peak rate is unknown."""
        peak = peak_tflops(self.name) if self.on_gpu else None
        operations = self.operations_per_token
        if peak is None or operations is None or not tokens_per_s:
            return None, None
        formula = (
            f"{operations:.4g} operations per token x {tokens_per_s:,.0f} real tok/s / {peak:g} "
            f"TFLOP/s, dense half precision of {self.name}"
        )
        return operations * tokens_per_s / (peak * 1e12), formula


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
    """Delays the device briefly now and then, so that the host gets ahead of the device.

    A spin is a kernel that does nothing for a while. Behind a spin, all kernels of a span are
    queued before the device starts the span. So the span takes as long as the device needs for it,
    without idle time: it becomes a reference. Steps with a spin train like all others. The spin
    itself is left out of the accounts.

    Steps are chosen by their number: every 2^n-th step has a spin. So all ranks spin in the same
    steps and wait for each other once, instead of one after another.

    Example: the host takes 50 ms to queue a span, and a step takes 200 ms. A spin takes 1.2 * 50 ms
    + 0.2 ms = 60.2 ms. To stay below 0.3 % of the time, there must be 60.2 / (0.003 * 200) = 100.3
    steps between spins. The next power of two is 128.
    """

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
