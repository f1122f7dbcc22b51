"""Muon and AdamW as one optimizer, which skips a step on the device without a wait.

Muon replaces the momentum of a matrix by the nearest matrix with equal singular values. Queries,
keys and values have gradients of very different sizes, so sections of a weight are matrices of
their own. Matrices of one shape are stacked: operators do not depend on the number of layers.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_MOMENTUM, _EPSILON, _ROUNDS = 0.95, 1e-7, 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Keller Jordan's iteration: singular values near 1
_UPDATE_RMS = 0.2  # about that of AdamW's updates: both have one rate and one weight decay
_MOST_ELEMENTS = 1 << 26  # of a stack: a step needs several copies of it


class MuonAdamW(torch.optim.Optimizer):
    """Muon for some matrices, in the last group, and a fused AdamW for the other weights.

    Set `grad_scale`, the divisor of gradients, and `found_inf` before `step`: if that is not 0,
    weights, moments and momentum stay. `matrices` has a function for each weight of Muon, which
    returns views of the matrices in it. `dtype` is the half precision of their products.
    """

    def __init__(
        self,
        matrices: Mapping[Tensor, Callable[[Tensor], list[Tensor]]],
        adamw: torch.optim.AdamW,
        weight_decay: float,
        dtype: torch.dtype,
        compiled: bool,
    ) -> None:
        own = {"params": list(matrices), "weight_decay": weight_decay, "lr": 1e-3}
        self._matrices, self._dtype, self._adamw = matrices, dtype, adamw
        self._update: Any = torch.compile(_update, dynamic=False) if compiled else _update
        self.found_inf, self.grad_scale = next(iter(matrices)).new_tensor([0.0, 1.0]).unbind()
        super().__init__([*adamw.param_groups, own], {})
        adamw.param_groups, adamw.state = self.param_groups[:-1], self.state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all weights from their gradients, or none."""
        adamw: Any = self._adamw
        adamw.found_inf, adamw.grad_scale = self.found_inf, self.grad_scale
        adamw.step()
        group, counts, stacks = self.param_groups[-1], 1 - self.found_inf, defaultdict(list)
        rate, keep = counts * (-_UPDATE_RMS * group["lr"]), group["lr"] * group["weight_decay"]
        weights = {weight: weight.grad for weight in self._matrices if weight.grad is not None}
        for weight, gradient in weights.items():
            if not (state := self.state[weight]):
                state["momentum_buffer"] = torch.zeros_like(weight)
            trio = map(self._matrices[weight], (weight, gradient, state["momentum_buffer"]))
            for parts in zip(*trio, strict=True):
                stacks[parts[0].shape].append(parts)
        if weights:
            torch._foreach_mul_([*weights], 1 - counts * keep)  # pyright: ignore[reportPrivateImportUsage]
        for shape, found in stacks.items():
            most = max(1, _MOST_ELEMENTS // shape.numel())
            for start in range(0, len(found), most):
                weights_S, *states_S = zip(*found[start : start + most], strict=True)
                settings = self.grad_scale, counts, self._dtype
                momentum_SMN, update_SMN = self._update(*states_S, *settings)
                torch._foreach_copy_(states_S[1], momentum_SMN.unbind())  # pyright: ignore[reportPrivateImportUsage]
                torch._foreach_add_(weights_S, (update_SMN * rate).unbind())  # pyright: ignore[reportPrivateImportUsage]


def _update(
    gradients_S: tuple[Tensor, ...],
    momenta_S: tuple[Tensor, ...],
    divisor: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the next momentum of a stack, which stays where `counts` is 0, and its updates.

    Updates have nearly equal singular values and a root mean square of 1. Singular values near 0
    stay smaller, so the root mean square would differ by itself."""
    gradient_SMN = torch.where(counts > 0, torch.stack(gradients_S) / divisor, 0.0)
    momentum_SMN = torch.stack(momenta_S).lerp(gradient_SMN, counts * (1 - _MOMENTUM))
    tall_SMN, (a, b, c) = gradient_SMN.lerp(momentum_SMN, _MOMENTUM), _COEFFICIENTS
    if dtype == torch.float16:  # gradients may be too small for its range
        tall_SMN = tall_SMN / _norm(tall_SMN)
    tall_SMN = tall_SMN.to(dtype)
    tall_SMN = tall_SMN / _norm(tall_SMN)
    for _ in range(_ROUNDS):
        gram_SNN = torch.bmm(tall_SMN.mT, tall_SMN)
        gram_SNN = torch.baddbmm(gram_SNN, gram_SNN, gram_SNN, beta=b, alpha=c)
        tall_SMN = torch.baddbmm(tall_SMN, tall_SMN, gram_SNN, beta=a)
    rms = _norm(tall_SMN) / (tall_SMN.shape[1] * tall_SMN.shape[2]) ** 0.5
    return momentum_SMN, tall_SMN / rms.clamp(min=_EPSILON)


def _norm(tall_SMN: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix, never 0."""
    norm_S11: Tensor = torch.linalg.vector_norm(tall_SMN, dim=(1, 2), keepdim=True)
    return norm_S11.clamp(min=_EPSILON)
