"""The machine under a meter: its clock, what it is called, how fast it is, what it has consumed.

All of it is best effort. What a driver or a build of torch does not tell is left out of the report,
and ends no training. Torch is imported when a meter is made, not before.
"""

import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tokenfeed.trainer.stall.clock import Clock, HostClock

if TYPE_CHECKING:
    import torch

__all__ = ["Machine", "clock_of"]


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
    from tokenfeed.trainer.stall.events import EventClock

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
