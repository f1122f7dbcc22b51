"""What `train` decides by the machine: settings for its GPU, and what to do without.

On a CPU nothing is decided. What cannot work here is left out, with one line that says so.
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
    """What decides."""

    gpu: Gpu | None
    """Of this run; None: it runs on the CPU."""
    cores: int
    has_compiler: bool
    """Of C, which torch's compiler asks for."""
    unused: str | None = None
    """Why torch leaves a GPU alone that the driver sees."""


def machine_of(config: TrainConfig, gpu_name: str | None) -> Machine:
    """This machine, or with a name of a GPU one that has it; takes a second, for torch."""
    from tokenfeed.trainer.planned import find_gpu

    gpu = find_gpu(config, gpu_name)
    return Machine(
        gpu=gpu,
        cores=num_cores(),
        has_compiler=bool(os.environ.get("CC")) or any(map(shutil.which, _COMPILERS)),
        unused=_why_unused() if gpu is None and config.device == "auto" else None,
    )


def sized(config: TrainConfig, machine: Machine, said: Container[str]) -> list[Choice]:
    """What suits the GPU, but for what was said. A step trains the same with all of it."""
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
    """What to do without, for this machine lacks it; the reason says all."""
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
    """None where no GPU is left alone, or by CUDA_VISIBLE_DEVICES."""
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
