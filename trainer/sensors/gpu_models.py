"""Memory and peak speed of GPU models, so that a run can be planned on any machine.

Memory is what `nvidia-smi` shows, in GiB, less what the driver keeps. TFLOP/s are from the vendors'
data sheets for dense matrix products in half precision, as torchtitan, nanochat and llm.c use them
for their MFU. A GPU in a small case or with a lower power limit is slower.
"""

import re
from dataclasses import dataclass
from typing import Literal

from tokenfeed.pipeline.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """The figures of a GPU that predict a run."""

    name: str
    gib: float
    tflops: float | None
    """Peak for dense matrix products in `precision`; None if unknown."""
    precision: Literal["bf16", "fp16"] = "bf16"
    """The number format in which the GPU is fast."""

    @property
    def bytes(self) -> int:
        """Memory in bytes."""
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


def parse_gpu(text: str) -> Gpu:
    """Return the GPU that --gpu names: a known model, or a number of GiB.

    Raises:
        ConfigError: The text is neither.
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


def identify_gpu(device_name: str, num_bytes: int, precision: Literal["bf16", "fp16"]) -> Gpu:
    """Return a present GPU by its driver's name. Its peak speed is known if `GPUS` has the
    model."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    same = [gpu for gpu in GPUS.values() if words.issuperset(gpu.name.split("-"))]
    closest = max(same, key=lambda gpu: gpu.name.count("-"), default=None)
    return Gpu(device_name, num_bytes / GIB, closest.tflops if closest else None, precision)
