"""The clock of the device that a meter measures, and its peak rate."""

import re
from typing import TYPE_CHECKING

from tokenfeed.trainer.stall.marks import Clock, EventClock

if TYPE_CHECKING:
    import torch


def clock_of(device: "torch.device | str | None") -> Clock:
    """Return the clock of a device. None: the first accelerator, or the CPU without one."""
    from tokenfeed.pipeline.feeding.devices import default_device, resolve_device

    found = default_device() if device is None else resolve_device(device)
    return Clock() if found.type == "cpu" else EventClock(found)


def mfu(name: str, operations_per_token: float, tokens_per_s: float) -> tuple[float, str] | None:
    """Return the MFU of a device, and its formula; None if the peak rate is unknown."""
    peak = peak_tflops(name)
    if peak is None or not tokens_per_s:
        return None
    formula = (
        f"{operations_per_token:.4g} operations per token x {tokens_per_s:,.0f} real tok/s / "
        f"{peak:g} TFLOP/s, dense half precision of {name}"
    )
    return operations_per_token * tokens_per_s / (peak * 1e12), formula


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
