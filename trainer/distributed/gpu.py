"""Find out whether torch can use the GPU of this machine, and which wheel of torch can."""

import os
from collections.abc import Collection
from typing import NamedTuple

import torch

from tokenfeed.pipeline.feeding.devices import cuda

_INDEX = "https://download.pytorch.org/whl"
_OLDEST, _OF_CUDA_13, _BLACKWELL = (5, 0), (7, 5), (10, 0)
"""Lowest capability in wheels for CUDA 12.6, the same for CUDA 13, and the lowest that wheels for
CUDA 12.6 lack. Wheels for CUDA 12.8, up to torch 2.11, have kernels for Blackwell GPUs."""


def why_unusable() -> str | None:
    """Return why torch cannot use the GPU of this machine, and the command that installs a torch
    which can; None if torch can use the GPU, or if there is no GPU."""
    if torch.version.hip or os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return None
    if is_there := cuda.is_available():
        capability, built_for = cuda.get_device_capability(), cuda.get_arch_list()
        if not built_for or _has_kernels(capability, built_for):
            return None
    if (card := _first_card()) is None:
        return None
    lacks = "is built without CUDA"
    if is_there:
        lacks = f"has no kernels for its capability {card.capability[0]}.{card.capability[1]}"
    elif torch.version.cuda:
        lacks = f"is built for CUDA {torch.version.cuda}, and cannot start it with this driver"
    advice = "No torch from 2.9 on has kernels for it"
    if card.capability >= _OLDEST:
        command = f"pip install --force-reinstall torch --index-url {_INDEX}/{card.wheel}"
        advice = f"Run `{command}`"
    return f"there is a {card.name}, but torch {torch.__version__} {lacks}. {advice}."


def _has_kernels(capability: tuple[int, int], built_for: Collection[str]) -> bool:
    """Return whether a build for these architectures, such as sm_80 and compute_90, runs on a
    GPU: machine code of the same major version, or PTX, which the driver compiles."""
    for built in built_for:
        kind, _, number = built.partition("_")
        code = divmod(int("".join(filter(str.isdigit, number)) or 0), 10)
        if code <= capability and (kind == "compute" or code[0] == capability[0]):
            return True
    return False


class _Card(NamedTuple):
    """A GPU, as NVML describes it."""

    name: str
    capability: tuple[int, int]
    driver: int
    """The newest CUDA version of the driver, such as 12060 for 12.6."""

    @property
    def wheel(self) -> str:
        """The index of wheels that has kernels for this card, and suits its driver."""
        if self.capability < _OF_CUDA_13:
            return "cu126"
        if self.driver >= 13000:
            return "cu130"
        return "cu126" if self.capability < _BLACKWELL else "cu128"


def _first_card() -> _Card | None:
    """Return the first card that NVML sees."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        driver = pynvml.nvmlSystemGetCudaDriverVersion()
        return _Card(str(pynvml.nvmlDeviceGetName(handle)), (major, minor), driver)
    except pynvml.NVMLError:
        return None
