"""The device that a meter measures: its clock, its name, and its peak rate."""

import platform
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenfeed.trainer.stall.marks import Clock, EventClock

if TYPE_CHECKING:
    import torch


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
