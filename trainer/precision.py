"""Where and in which number format a run computes.

Chosen from the device: bf16 where it is native; fp16, with its gradients scaled against underflow,
on older GPUs; fp32 on the CPU, so that a resumed run repeats it bit for bit. Weights and optimizer
state are fp32 always; on CUDA what is left of fp32 matrix products runs as TF32.
"""

import contextlib
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config import DeviceName, PrecisionName

__all__ = ["Precision", "all_finite", "choose_device", "device_name"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: DeviceName) -> torch.device:
    """The device that `name` means on this machine.

    Raises:
        ConfigError: cuda is asked for, and there is none.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"`--device`: cuda asked for, but torch {torch.__version__} finds no CUDA device. "
            "Use --device cpu, or install a CUDA build of torch and its driver."
        )
    return torch.device("cuda", torch.cuda.current_device())


def device_name(device: torch.device) -> str:
    """For the report: the GPU's model, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Precision:
    """Autocast, and the way from a loss to a step of the optimizer.

    A step whose gradients are not finite is skipped on the device, without a wait: weights, moments
    and step count stay. With fp16 the loss is scaled up before backward and the gradients down
    again before clipping, and such a step lowers the scale.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.name = _choose(device) if name == "auto" else name
        self._device = device
        self.dtype = _DTYPES[self.name]
        self._scaler = torch.amp.GradScaler(device.type, enabled=self.name == "fp16")
        if device.type == "cuda":
            # The older switch: after the newer one, whoever still reads the older gets an error.
            torch.set_float32_matmul_precision("high")

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of forward and loss."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scale: Tensor, clip_norm: float
    ) -> Tensor:
        """Multiply the gradients by `scale`, clip, update, clear; gives the norm before clipping.

        The norm stays on the device; where it is not finite, nothing was updated.
        """
        self._scaler.unscale_(optimizer)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if not self._scaler.is_enabled():  # the scaler tells the fused kernel the same by itself
            optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self._scaler.step(optimizer)
        self._scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty without one."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a scale found earlier; a run that had none starts with the default."""
        if state and self._scaler.is_enabled():
            self._scaler.load_state_dict(state)


def all_finite(model: nn.Module) -> bool:
    """Whether every weight is a finite number; waits for the device."""
    return bool(torch.stack([p.isfinite().all() for p in model.parameters()]).all())


def _choose(device: torch.device) -> Literal["fp32", "bf16", "fp16"]:
    if device.type == "cpu":
        return "fp32"
    # Older GPUs emulate bf16, several times slower than their native fp16.
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
