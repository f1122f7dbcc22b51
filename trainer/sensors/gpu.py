"""The GPU of a run: its name, its peak speed, and the memory that torch holds."""

import re

import torch

from tokenfeed.pipeline.feeding.devices import accelerator


def device_name(device: torch.device) -> str:
    """Return the GPU's model, or cpu, for reports."""
    if device.type == "cpu":
        return device.type
    return str(accelerator(device).module.get_device_name(device))


def memory_held(device: torch.device) -> int | None:
    """Return the bytes of a GPU that torch holds; None on a CPU."""
    return None if device.type == "cpu" else accelerator(device).module.memory_reserved(device)


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
