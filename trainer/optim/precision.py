"""The device and the number format of a run.

Chosen from the device: bf16 where it is native; fp32 on older GPUs, and on the CPU, so that a
resumed run repeats it bit for bit. Weights and optimizer state are fp32 always; on CUDA what is
left of fp32 matrix products runs as TF32.
"""

import contextlib
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.trainer.config.run_config import PrecisionName
from tokenfeed.trainer.distributed.fsdp import full_tensor, replicated_scalars
from tokenfeed.trainer.distributed.world import State

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Precision:
    """Autocast, and the optimizer's step.

    A step whose gradients are not finite is skipped on the device, without a wait: weights, moments
    and step count stay, and the skip is counted.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.name = _choose(device) if name == "auto" else name
        self._device = device
        self.dtype = _DTYPES[self.name]
        self._skips = torch.zeros(2, device=device)
        allow_tf32(device)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of forward and loss."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self.dtype)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        scale: Tensor | float,
        clip_norm: float,
        *,
        keeps_gradients: bool = False,
    ) -> Tensor:
        """Scale and clip the gradients, update the weights, clear the gradients; return the norm
        before clipping.

        The norm stays on the device; where it is not finite, nothing was updated.

        Args:
            optimizer: From `make_optimizer`: one that heeds `grad_scale` and `found_inf`.
            scale: A number, or a tensor without dimensions that nobody has waited for.
            clip_norm: Longer gradients, after scaling, are shortened to this.
            keeps_gradients: Whether to set gradients to 0 rather than to free them.
        """
        parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        norm = full_tensor(nn.utils.get_total_norm(gradients)) * scale
        # One divisor scales and clips. The optimizer's kernel applies it to what it reads anyway.
        divisor = ((norm + 1e-6) / clip_norm).clamp(min=1.0) / scale
        optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
        optimizer.found_inf = self._count(norm)  # type: ignore[attr-defined]
        with replicated_scalars(gradients):
            optimizer.step()
        optimizer.zero_grad(set_to_none=not keeps_gradients)
        return norm

    @property
    def skips(self) -> Tensor:
        """Skipped steps so far, and skipped steps in a row until now: two numbers on the device."""
        return self._skips.clone()

    def state_dict(self) -> State:
        """Return the skipped steps."""
        return {"skips": self.skips}

    def load_state_dict(self, state: State) -> None:
        """Continue with saved skips."""
        self._skips.copy_(state["skips"])

    def _count(self, norm: Tensor) -> Tensor:
        """Count and return whether to skip this step: 1 or 0, on the device."""
        skip = (~norm.isfinite()).float()
        self._skips += skip
        self._skips[1] *= skip
        return skip


def tune_convolutions(model: nn.Module) -> None:
    """Let cuDNN choose its kernels by trial, once for each shape of a batch, if the model has
    convolutions.

    Which one is fastest may differ between runs, and the last bits of their results with it.
    """
    convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules())
    torch.backends.cudnn.benchmark = convolves


def allow_tf32(device: torch.device) -> None:
    """Let products of fp32 matrices use TF32 on a GPU."""
    if device.type == "cuda":
        # The older switch: after the newer one, code that reads the older gets an error.
        torch.set_float32_matmul_precision("high")


def _choose(device: torch.device) -> Literal["fp32", "bf16"]:
    # Older GPUs emulate bf16, and are not faster with it.
    native = device.type != "cpu" and accelerator(device).has_bfloat16()
    return "bf16" if native else "fp32"
