"""One GPU by NVML: memory, utilization, power, temperature and clock."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tokenfeed.pipeline.feeding.devices import accelerator


def device_name(device: torch.device) -> str:
    """Return the GPU's model, or cpu, for reports."""
    if device.type == "cpu":
        return device.type
    return str(accelerator(device).module.get_device_name(device))


def device_uuid(device: torch.device) -> str | None:
    """Return the UUID by which NVML finds a GPU; None for other devices."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """A GPU at one moment."""

    name: str | None = None
    memory_bytes: int | None = None
    """In use by all processes."""
    memory_total_bytes: int | None = None
    utilization: float | None = None
    """Share of NVML's last sampling period in which any kernel ran, 0 to 1."""
    power_watts: float | None = None
    power_limit_watts: float | None = None
    celsius: int | None = None
    clock_mhz: int | None = None
    """Clock of the multiprocessors."""


class GpuSensor:
    """Reads one GPU by its NVML handle. A partitioned GPU lacks some figures."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.name = self._ask("nvmlDeviceGetName", str)

    def read(self) -> GpuReading:
        """Read the GPU."""
        ask = self._ask
        memory = ask("nvmlDeviceGetMemoryInfo", lambda info: (int(info.used), int(info.total)))
        return GpuReading(
            name=self.name,
            memory_bytes=memory[0] if memory else None,
            memory_total_bytes=memory[1] if memory else None,
            utilization=ask("nvmlDeviceGetUtilizationRates", lambda rates: int(rates.gpu) / 100),
            power_watts=ask("nvmlDeviceGetPowerUsage", _thousandth),
            power_limit_watts=ask("nvmlDeviceGetEnforcedPowerLimit", _thousandth),
            celsius=ask("nvmlDeviceGetTemperature", int, "NVML_TEMPERATURE_GPU"),
            clock_mhz=ask("nvmlDeviceGetClockInfo", int, "NVML_CLOCK_SM"),
        )

    def _ask(self, name: str, convert: Callable[[Any], T], *constants: str) -> T | None:
        """Call an NVML function and convert its result; None if it fails."""
        import pynvml

        try:
            arguments = [getattr(pynvml, constant) for constant in constants]
            return convert(getattr(pynvml, name)(self._handle, *arguments))
        except (pynvml.NVMLError, AttributeError, ValueError):  # an older driver lacks functions
            return None


def sensor_of(uuid: str) -> GpuSensor | None:
    """Return the sensor of the GPU with a UUID of torch; None if NVML does not know it.

    torch and NVML number GPUs differently, so a number would not do.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        return GpuSensor(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except pynvml.NVMLError:
        return None


def gpus_here() -> list[GpuSensor]:
    """Return all GPUs of NVML, in its order; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return [GpuSensor(pynvml.nvmlDeviceGetHandleByIndex(number)) for number in range(count)]
    except pynvml.NVMLError:
        return []


def _thousandth(value: Any) -> float:
    return int(value) / 1e3
