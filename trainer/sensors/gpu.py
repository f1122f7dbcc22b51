"""One GPU by NVML: memory, utilization, power, energy, clock and what limits the clock.

GPUs that a run can be planned for on any machine: their memory and their fastest arithmetic.

Memory is what `nvidia-smi` shows, in GiB, less what the driver keeps. TFLOP/s are those of the
vendors' data sheets for dense matrix products in half precision, as torchtitan, nanochat and llm.c
use them for their MFU; a GPU in a small case or with a lower power limit does less.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.devices import accelerator

__all__ = [
    "GIB",
    "GPUS",
    "Gpu",
    "GpuReading",
    "GpuSensor",
    "device_name",
    "device_uuid",
    "gpu_of",
    "gpus_here",
    "recognized",
    "sensor_of",
]


def device_name(device: torch.device) -> str:
    """For the report: the GPU's model, or cpu."""
    if device.type == "cpu":
        return device.type
    return str(accelerator(device).module.get_device_name(device))


def device_uuid(device: torch.device) -> str | None:
    """What NVML knows a GPU by; None of what it does not know."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a plan needs to know of a GPU."""

    name: str
    gib: float
    tflops: float | None
    """Dense, in `precision`; None: not known."""
    precision: Literal["bf16", "fp16"] = "bf16"
    """What it is fast in."""

    @property
    def bytes(self) -> int:
        """Its memory."""
        return int(self.gib * GIB)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("B200", 178, 2250),
        Gpu("H200", 139, 989),
        Gpu("H100", 79, 989),
        Gpu("H100-NVL", 93, 835),
        Gpu("H100-PCIe", 79, 756),
        Gpu("A100", 79, 312),
        Gpu("A100-40", 39, 312),
        Gpu("L40S", 44, 362),
        Gpu("A40", 44, 149.7),
        Gpu("A6000", 47, 154.8),
        Gpu("L4", 22, 121),
        Gpu("RTX-5090", 31, 209.5),
        Gpu("RTX-4090", 23.5, 165.2),
        Gpu("RTX-3090", 23.5, 71),
        Gpu("V100", 15.7, 125, "fp16"),
        Gpu("V100-32", 31.7, 125, "fp16"),
        Gpu("T4", 14.5, 65, "fp16"),
    )
}


def gpu_of(text: str) -> Gpu:
    """The GPU that --gpu names, or one of so many GiB.

    Raises:
        ConfigError: It is neither.
    """
    known = {name.lower(): gpu for name, gpu in GPUS.items()}
    found = known.get(text.lower().replace(" ", "-"))
    if found is not None:
        return found
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise ConfigError(
            f"`--gpu`={text}: expected one of {', '.join(GPUS)}, or its memory in GiB, like 24."
        )
    return Gpu(f"a GPU of {gib:g} GiB", gib, None)


def recognized(device_name: str, num_bytes: int, precision: Literal["bf16", "fp16"]) -> Gpu:
    """A GPU that is there, by what its driver calls it; its speed where that names one of ours."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    same = [gpu for gpu in GPUS.values() if words.issuperset(gpu.name.split("-"))]
    closest = max(same, key=lambda gpu: gpu.name.count("-"), default=None)
    return Gpu(device_name, num_bytes / GIB, closest.tflops if closest else None, precision)


T = TypeVar("T")

_REASONS = {
    "nvmlClocksEventReasonSwPowerCap": "power limit",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksEventReasonSwThermalSlowdown": "heat",
    "nvmlClocksEventReasonHwThermalSlowdown": "heat",
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonApplicationsClocksSetting": "clocks set by hand",
}
"""Reasons of NVML for a clock below its highest, in words. An idle GPU is not one of them."""


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
    joules: float | None = None
    """Consumed since the driver was loaded."""
    celsius: int | None = None
    clock_mhz: int | None = None
    """Clock of the multiprocessors."""
    held_back_by: tuple[str, ...] = ()
    """Why the clock is below its highest."""


class GpuSensor:
    """Reads one GPU by its NVML handle.

    A function that NVML refuses is not called again: a partitioned GPU lacks some figures.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._refused: set[str] = set()
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
            joules=self.joules(),
            celsius=ask("nvmlDeviceGetTemperature", int, "NVML_TEMPERATURE_GPU"),
            clock_mhz=ask("nvmlDeviceGetClockInfo", int, "NVML_CLOCK_SM"),
            held_back_by=ask("nvmlDeviceGetCurrentClocksEventReasons", _reasons) or (),
        )

    def joules(self) -> float | None:
        """Return the energy since the driver was loaded; None if it is not counted."""
        return self._ask("nvmlDeviceGetTotalEnergyConsumption", _thousandth)

    def _ask(self, name: str, convert: Callable[[Any], T], *constants: str) -> T | None:
        """Call an NVML function and convert its result; None if it fails."""
        if name in self._refused:
            return None
        import pynvml

        try:
            arguments = [getattr(pynvml, constant) for constant in constants]
            return convert(getattr(pynvml, name)(self._handle, *arguments))
        except (pynvml.NVMLError, AttributeError, ValueError):  # an older package lacks names
            self._refused.add(name)
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


def _reasons(bits: Any) -> tuple[str, ...]:
    import pynvml

    found = (text for name, text in _REASONS.items() if int(bits) & getattr(pynvml, name, 0))
    return tuple(dict.fromkeys(found))
