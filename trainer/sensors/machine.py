"""The machine of a run: GPUs by NVML (memory, utilization, power, temperature and clock), and the
use of cores and memory of the host.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import torch

from tokenfeed.pipeline.feeding.devices import accelerator


def device_name(device: torch.device) -> str:
    """Return the GPU's model, or cpu, for reports."""
    if device.type == "cpu":
        return device.type
    return str(accelerator(device).module.get_device_name(device))


T = TypeVar("T")
_SECONDS_BETWEEN = 2.0


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


def sensor_of(device: torch.device) -> GpuSensor | None:
    """Return the sensor of a GPU; None for another device, or if NVML does not know it.

    torch and NVML number GPUs differently, so a number would not do.
    """
    if device.type != "cuda":
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return GpuSensor(pynvml.nvmlDeviceGetHandleByUUID(uuid))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReading:
    """The host at one moment."""

    cores: int
    cores_busy: float
    """Cores in use since the previous reading, by all processes: 1.5 is one core and a half. The
    first reading of a process has 0."""
    memory_free_bytes: int
    """Available to new processes without swapping."""
    memory_total_bytes: int


def read_host() -> HostReading:
    """Read the host."""
    cores, memory = psutil.cpu_count() or 1, psutil.virtual_memory()
    return HostReading(
        cores=cores,
        cores_busy=psutil.cpu_percent() / 100 * cores,
        memory_free_bytes=memory.available,
        memory_total_bytes=memory.total,
    )


class MachineReader:
    """Reads the host and the GPU of a run at progress lines.

    Reads at most every two seconds, since NVML takes milliseconds. Reads nothing more if a sensor
    raises: a failed driver must not stop the training.
    """

    def __init__(self, device: torch.device) -> None:
        self._sensor, self._next_s = sensor_of(device), -math.inf
        self._latest: tuple[GpuReading | None, HostReading | None] = None, None

    def read(self) -> tuple[GpuReading | None, HostReading | None]:
        """Return the latest readings of GPU and host."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _SECONDS_BETWEEN
            try:
                self._latest = self._sensor.read() if self._sensor else None, read_host()
            except Exception:
                self._latest, self._next_s = (None, None), math.inf
        return self._latest
