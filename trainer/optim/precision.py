"""The number format of a run, the scale of its loss, and switches of torch for speed.

The number format is bf16 on a GPU that has it, fp16 on Volta and Turing, and fp32 on older GPUs,
and on the CPU, so that a resumed run repeats it bit for bit. Weights and optimizer state are fp32
always. On Ampere and later, the remaining fp32 matrix products run as TF32.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from tokenfeed.pipeline.feeding.devices import cuda
from tokenfeed.trainer.config.run_config import PrecisionName
from tokenfeed.trainer.distributed.world import State

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE, _GROWTH, _BACKOFF, _GROWTH_STEPS = 2.0**16, 2.0, 0.5, 2000
"""The defaults of `torch.amp.GradScaler`."""


def choose_precision(name: PrecisionName, device: torch.device) -> tuple[PrecisionName, str]:
    """Return the number format of a run, and the reason in words."""
    if device.type == "cpu":
        return ("fp32", "cpu") if name == "auto" else (name, "as set")
    capability = tuple(cuda.get_device_capability(device))
    shown = f"compute capability {capability[0]}.{capability[1]}"
    if name != "auto":
        is_slow = name == "bf16" and capability < (8, 0)
        return name, f"as set; {shown} only emulates bf16" if is_slow else "as set"
    if capability >= (8, 0):
        return "bf16", f"{shown} has bf16"
    if capability >= (7, 0):
        return "fp16", f"{shown} has no bf16, but fast fp16"
    return "fp32", f"{shown} has neither bf16 nor fast fp16"


class Precision:
    """Autocast, the scale of the loss, and the number of skipped steps.

    With fp16, the loss is scaled up before the backward pass, so that small gradients do not become
    0. The scale follows the rules of `torch.amp.GradScaler`: it halves when gradients overflow, and
    doubles after 2,000 steps without an overflow. `GradScaler` itself would read values of the
    device to save its state, or to step an optimizer that is not fused.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.name, self.reason = choose_precision(name, device)
        self.is_scaled = self.name == "fp16"
        self._device = device
        self.dtype = _DTYPES[self.name]
        self._skips = torch.zeros(2, device=device)
        self._skipped, self._in_a_row = self._skips.unbind()
        self._scale = torch.full((), _FIRST_SCALE, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        allow_tf32(device)

    def line(self) -> str:
        """Return the number format in words, and the reason for it."""
        scaled = f", the loss scaled by {_FIRST_SCALE:,.0f} at first" if self.is_scaled else ""
        is_tf32 = self._device.type == "cuda" and cuda.get_device_capability(self._device)[0] >= 8
        rest = ", the rest of fp32 products in TF32" if is_tf32 else ""
        return f"precision: {self.name} ({self.reason}){scaled}{rest}"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of forward and loss."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self.dtype)

    def factor(self, divisor: float) -> Tensor | float:
        """Return what to multiply a loss by before its backward pass, instead of a division."""
        return self._scale / divisor if self.is_scaled else 1 / divisor

    def unscaled(self, scale: Tensor | float) -> Tensor | float:
        """Return the factor of gradients that also takes back the scale of the loss."""
        return scale / self._scale

    @property
    def skips(self) -> Tensor:
        """Skipped steps so far, and skipped steps in a row until now: two numbers on the device.

        With fp16, the number in a row leaves out overflows of gradients while the scale is at least
        1: a smaller scale cures these.
        """
        return self._skips.clone()

    @property
    def scale(self) -> Tensor:
        """The scale of the loss of the next step, on the device. Only fp16 uses it."""
        return self._scale.clone()

    def state_dict(self) -> State:
        """Return the skipped steps, the scale, and the steps since it changed: of every precision,
        so that a run can go on with another one."""
        return {"skips": self.skips, "scale": self.scale, "growth": self._growth.clone()}

    def load_state_dict(self, state: State) -> None:
        """Continue with a saved state."""
        self._skips.copy_(state["skips"])
        self._scale.copy_(state["scale"])
        self._growth.copy_(state["growth"])

    def count(self, skip: Tensor, scale: Tensor | float) -> None:
        """Count a step that was skipped or not, and update the scale, on the device."""
        hopeless = skip
        if self.is_scaled:  # `scale` is not finite if the loss was not
            hopeless = skip * (~torch.as_tensor(scale).isfinite() | (self._scale < 1))
            settings = _GROWTH, _BACKOFF, _GROWTH_STEPS
            torch._amp_update_scale_(self._scale, self._growth, skip, *settings)  # pyright: ignore[reportPrivateImportUsage]
        self._skipped.add_(skip)
        self._in_a_row.add_(hopeless).mul_(skip)


def tune_convolutions(model: nn.Module, *, repeats: bool) -> None:
    """Let cuDNN choose its kernels by trial, once for each shape of a batch, if the model has
    convolutions and few shapes of batches repeat.

    Which one is fastest may differ between runs, and the last bits of their results with it.
    """
    convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules())
    torch.backends.cudnn.benchmark = convolves and repeats


def allow_tf32(device: torch.device) -> None:
    """Let products of fp32 matrices use TF32 on a GPU."""
    if device.type == "cuda":
        # The older switch: after the newer one, code that reads the older gets an error.
        torch.set_float32_matmul_precision("high")
