"""Defaults that suit the GPU, and settings that this machine does not support.

A CPU changes no default. Unsupported settings are replaced, with one line that says why.
"""

import os
import shutil
from collections.abc import Container
from dataclasses import dataclass

from tokenfeed.pipeline.feeding.cores import num_cores
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.defaults import Choice
from tokenfeed.trainer.gpus import Gpu

__all__ = ["Machine", "able", "machine_of", "sized"]

_COMPILERS = ("cc", "gcc", "clang", "cl")
_FEW_CORES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine of a run."""

    gpu: Gpu | None
    """The GPU of the run; None on the CPU."""
    cores: int
    has_compiler: bool
    """Whether there is a C compiler, which torch.compile needs."""
    unused: str | None = None
    """Why torch does not use a GPU that the driver lists."""


def machine_of(config: TrainConfig, gpu_name: str | None) -> Machine:
    """Return this machine, with `gpu_name` instead of its GPU if given. Imports torch: a second."""
    from tokenfeed.trainer.planned import find_gpu

    gpu = find_gpu(config, gpu_name)
    return Machine(
        gpu=gpu,
        cores=num_cores(),
        has_compiler=bool(os.environ.get("CC")) or any(map(shutil.which, _COMPILERS)),
        unused=_why_unused() if gpu is None and config.device == "auto" else None,
    )


def sized(config: TrainConfig, machine: Machine, said: Container[str]) -> list[Choice]:
    """Return the defaults that suit the GPU, without given settings. They do not change a step."""
    gpu, choices = machine.gpu, []
    if gpu is None:
        return []
    several = config.micro_batch_tokens != "auto" and config.accumulation > 1
    if several and "micro_batch_tokens" not in said:
        reason = f"what fits {gpu.name}, {gpu.gib:.1f} GiB, in {gpu.precision}"
        choices.append(Choice({"micro_batch_tokens": "auto"}, reason))
    if machine.cores <= _FEW_CORES and "num_workers" not in said:
        choices.append(Choice({"num_workers": 1}, f"{machine.cores} cores"))
    return choices


def able(config: TrainConfig, machine: Machine) -> list[Choice]:
    """Return replacements of unsupported settings. The reason is the whole message."""
    gpu, choices = machine.gpu, []
    if machine.unused:
        choices.append(Choice({}, f"training on the CPU: {machine.unused}"))
    if config.compile and not machine.has_compiler:
        reason = f"--compile is left out: there is no C compiler ({', '.join(_COMPILERS)})"
        choices.append(Choice({"compile": False}, reason))
    if config.precision == "bf16" and gpu and gpu.precision == "fp16":
        reason = f"--precision fp16 instead of bf16, which {gpu.name} only emulates"
        choices.append(Choice({"precision": "fp16"}, reason))
    return choices


def _why_unused() -> str | None:
    """Return None if torch uses the GPU, or CUDA_VISIBLE_DEVICES hides it."""
    import pynvml
    import torch

    try:
        pynvml.nvmlInit()
        count, driver = pynvml.nvmlDeviceGetCount(), pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None
    if not count or "CUDA_VISIBLE_DEVICES" in os.environ:
        return None
    if torch.version.cuda is None:
        return "a GPU is here, and this torch was built without CUDA. Install one with it"
    return (
        f"a GPU is here, and its driver {driver} does not run CUDA {torch.version.cuda} of this "
        "torch. Install a newer driver, or a torch for an older CUDA"
    )
