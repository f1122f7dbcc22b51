"""The device under a meter: its name, peak rate, energy and memory, and the clock of a GPU.

All of it is best effort. If a driver or a build of torch does not return a figure, the report
leaves the figure out, and the training continues. Torch is imported when a meter is made.
"""

import platform
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenfeed.trainer.stall.clocks import Clock, HostClock

if TYPE_CHECKING:
    import torch

__all__ = ["EventClock", "Machine", "clock_of"]


class Machine:
    """One device.

    Args:
        device: None for the first accelerator that is here, else the CPU.
        operations_per_token: For the MFU.
        devices: How many share the tokens, of which this is one.
        clock: One that belongs to no device of torch; then there is none.
    """

    def __init__(
        self,
        device: "torch.device | str | None",
        operations_per_token: float | None,
        devices: int,
        clock: Clock[Any] | None,
    ) -> None:
        self.operations_per_token = operations_per_token and operations_per_token / devices
        self._devices = devices
        self.device = None if clock is not None else _resolve(device)
        self._energy: Callable[[], float | None] = _nothing
        self._joules_before: float | None = None
        self._tokens = 0
        if self.device is not None and self.on_gpu:
            self._energy = _energy_of(self.device)

    @property
    def on_gpu(self) -> bool:
        """Whether it is an accelerator of torch."""
        return self.device is not None and self.device.type != "cpu"

    @property
    def name(self) -> str:
        """What its maker calls it."""
        if not self.on_gpu or self.device is None:
            return f"CPU, {platform.machine()}"
        try:
            return str(_module(self.device).get_device_name(self.device))
        except Exception:  # see above
            return str(self.device)

    @property
    def peak_tflops(self) -> float | None:
        """Of its dense arithmetic in half precision; None where that is not known."""
        from tokenfeed.trainer.sensors.gpu_models import recognized

        return recognized(self.name, 0, "bf16").tflops if self.on_gpu else None

    def begin(self) -> None:
        """What is consumed counts from now on."""
        self._tokens, self._joules_before = 0, self._energy()

    def add(self, tokens: int) -> None:
        """So many tokens were trained on."""
        self._tokens += tokens

    def joules_per_token(self) -> float | None:
        """Energy of all devices, taken for alike, by tokens; None where no driver tells."""
        now = self._energy()
        if now is None or self._joules_before is None or not self._tokens:
            return None
        return (now - self._joules_before) * self._devices / self._tokens

    def allocator_statistics(self) -> Callable[[], dict[str, Any]] | None:
        """Reads the statistics of torch's allocator; None where there is none."""
        if not self.on_gpu or self.device is None:
            return None
        device, read = (
            self.device,
            getattr(_module(self.device), "memory_stats_as_nested_dict", None),
        )
        return None if read is None else lambda: dict(read(device))


def clock_of(machine: Machine) -> Clock[Any]:
    """The clock of a machine."""
    if not machine.on_gpu or machine.device is None:
        return HostClock()

    return EventClock(machine.device)


def _resolve(device: "torch.device | str | None") -> "torch.device":
    from tokenfeed.pipeline.feeding.devices import default_device, resolve_device

    return default_device() if device is None else resolve_device(device)


def _module(device: "torch.device") -> Any:
    from tokenfeed.pipeline.feeding.devices import accelerator

    return accelerator(device).module


def _energy_of(device: "torch.device") -> Callable[[], float | None]:
    from tokenfeed.trainer.sensors.gpu import device_uuid, sensor_of

    uuid = device_uuid(device)
    sensor = None if uuid is None else sensor_of(uuid)
    return _nothing if sensor is None else sensor.joules


def _nothing() -> None:
    return None


_CYCLES_PER_S = 1.5e9
"""About; a spin is measured like everything else, and asked for with a margin."""


class EventClock:
    """Events are kept in a pool and asked with `query`, never waited for.

    An elapsed time is a 32-bit float of milliseconds, exact to microseconds only when short: hence
    neighbours only.
    """

    method = (
        "GPU events, not yet compared with a trace of a GPU: between events around all that queues "
        "no work of the training, all time is idle; inside the work, idle time is what steps take "
        "longer than steps that the host had queued before they began"
    )
    is_beside_host = True

    def __init__(self, device: "torch.device") -> None:
        from tokenfeed.pipeline.feeding.devices import accelerator

        self._device = device
        """Not always the current device of the thread: loops may use several."""
        self._accelerator = accelerator(device)
        self._module: Any = self._accelerator.module
        self._new_event = partial(self._module.Event, enable_timing=True)
        self._pool: list[torch.Event] = []

    def now(self) -> float:
        """Host time."""
        return time.perf_counter()

    def mark(self) -> "tuple[torch.Event, float, float]":
        """Record an event on the device's current stream."""
        event = self._pool.pop() if self._pool else self._new_event()
        stream = self._accelerator.current_stream()
        before = time.perf_counter()
        event.record(stream)
        return event, before, time.perf_counter()

    def passed(self, mark: "torch.Event") -> bool:
        """Whether the event has happened."""
        return bool(mark.query())

    def seconds(self, earlier: "torch.Event", later: "torch.Event") -> float:
        """GPU time between two events."""
        return float(earlier.elapsed_time(later)) / 1e3

    def recycle(self, mark: "torch.Event") -> None:
        """Keep the event for a later mark."""
        self._pool.append(mark)

    def spin(self, seconds: float) -> bool:
        """A kernel that counts cycles; a private function of torch, which may lack it."""
        try:
            with self._module.device(self._device):
                self._module._sleep(int(seconds * _CYCLES_PER_S))
        except (AttributeError, RuntimeError):  # a build of torch without it
            return False
        return True

    def takes_marks(self) -> bool:
        """Not while a CUDA graph is captured: an event would become a part of it."""
        try:
            with self._module.device(self._device):
                return not self._module.is_current_stream_capturing()
        except (AttributeError, RuntimeError):  # see above: none is captured
            return True
