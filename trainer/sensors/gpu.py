"""The GPU of a run: its name and peak speed, and memory, utilization and power as torch reads them
by NVML."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenfeed.pipeline.feeding.devices import accelerator

_SECONDS_BETWEEN = 2.0


def device_name(device: torch.device) -> str:
    """Return the GPU's model, or cpu, for reports."""
    if device.type == "cpu":
        return device.type
    return str(accelerator(device).module.get_device_name(device))


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """A GPU at one moment. None stands for a figure that the driver does not have."""

    memory_bytes: int | None = None
    """In use by all processes."""
    utilization: float | None = None
    """Share of NVML's last sampling period in which any kernel ran, 0 to 1."""
    power_watts: float | None = None


class GpuReader:
    """Reads the GPU of a run at progress lines: at most every two seconds, since NVML takes
    milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next_s = -math.inf if device.type == "cuda" else math.inf
        self._latest: GpuReading | None = None

    def read(self) -> GpuReading | None:
        """Return the latest reading; None without CUDA."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _SECONDS_BETWEEN
            percent, milliwatts = (
                self._ask(torch.cuda.utilization),
                self._ask(torch.cuda.power_draw),
            )
            self._latest = GpuReading(
                memory_bytes=self._ask(torch.cuda.device_memory_used),
                utilization=None if percent is None else percent / 100,
                power_watts=None if milliwatts is None else milliwatts / 1000,
            )
        return self._latest

    def _ask(self, read: Callable[[Any], int]) -> int | None:
        """Return a figure; None if the driver fails, which must not stop the training."""
        try:
            return read(self._device)
        except Exception:
            return None


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
