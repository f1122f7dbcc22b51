"""Muon and AdamW as one optimizer, which skips a step on the device without a wait.

Muon replaces the momentum of a matrix by the nearest matrix with equal singular values. Queries,
keys and values have gradients of very different sizes. If one weight holds all three, each must be
updated as a matrix of its own: otherwise queries and keys would hardly move. Matrices of one shape
are stacked, so that the number of operators does not depend on the number of layers.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenfeed.trainer.distributed.world import World

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Keller Jordan's quintic iteration: it brings singular values near 1."""
_ROUNDS = 5
_EPSILON = 1e-7
_UPDATE_RMS = 0.2
"""About the size of AdamW's updates: both have one learning rate and one weight decay."""
_MOST_ELEMENTS = 1 << 26
"""Elements of the largest stack. A step needs several copies of a stack."""


class Sections(NamedTuple):
    """The matrices that a weight holds side by side."""

    dim: int
    sizes: tuple[int, ...]

    def of(self, weight: Tensor) -> list[Tensor]:
        """Return views of the sections, each with at least as many rows as columns."""
        one = len(self.sizes) == 1
        parts = (weight,) if one else torch.split(weight, list(self.sizes), self.dim)
        return [part if part.shape[0] >= part.shape[1] else part.mT for part in parts]


class MuonAdamW(torch.optim.Optimizer):
    """Muon for some matrices, AdamW for the other weights: one state, one list of groups.

    Args:
        matrices: The weights that Muon updates. They form the last group.
        adamw: A fused optimizer of the other weights. It shares its groups and its state with this
            optimizer from now on.
        weight_decay: Weight decay of the matrices.
        world: The ranks of the run. They share the work, and all of them get all updates.
        compiled: Whether to compile the update of a stack, when a shape is first met.
        dtype: Half precision of the matrix products.
    """

    found_inf: Tensor | None = None
    """Set before `step`: if it is not 0, weights, moments and momentum stay as they are."""
    grad_scale: Tensor | None = None
    """Set before `step`: the divisor of gradients."""

    def __init__(
        self,
        matrices: Mapping[Tensor, Sections],
        adamw: torch.optim.AdamW,
        weight_decay: float,
        world: World,
        *,
        compiled: bool,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        own = {"params": list(matrices), "weight_decay": weight_decay, "lr": 1e-3}
        self._matrices, self._adamw = matrices, adamw
        self._world, self._compiled, self._dtype = world, compiled, dtype
        super().__init__([*adamw.param_groups, own], {})
        adamw.param_groups, adamw.state = self.param_groups[:-1], self.state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all weights from their gradients, or none."""
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.grad_scale = self.grad_scale  # type: ignore[attr-defined]
        self._adamw.step()
        weights: list[Tensor] = [each for each in self._matrices if each.grad is not None]
        if not weights:
            return
        group = self.param_groups[-1]
        one = torch.ones((), device=weights[0].device)
        counts = one if self.found_inf is None else 1 - self.found_inf
        divisor = one if self.grad_scale is None else self.grad_scale
        torch._foreach_mul_(weights, 1 - counts * (group["lr"] * group["weight_decay"]))  # pyright: ignore[reportPrivateImportUsage]
        rate = counts * (-_UPDATE_RMS * group["lr"])
        update: Any = _compiled_update() if self._compiled else _update
        like = self._world.rank, self._world.size, self._dtype
        for weights_S, gradients_S, momenta_S in self._stacks(weights):
            momentum_SMN, own = update(momenta_S, gradients_S, divisor, counts, *like)
            torch._foreach_copy_(momenta_S, momentum_SMN.unbind())  # pyright: ignore[reportPrivateImportUsage]
            update_SMN = self._world.concatenate(own)[: len(weights_S)]
            torch._foreach_add_(weights_S, (update_SMN * rate).unbind())  # pyright: ignore[reportPrivateImportUsage]

    def _stacks(self, weights: list[Tensor]) -> Iterator[list[tuple[Tensor, ...]]]:
        """Yield sections of one shape: their weights, gradients and momenta."""
        by_shape = defaultdict(list)
        for weight in weights:
            state, sections = self.state[weight], self._matrices[weight]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            trio = weight, weight.grad, state["momentum_buffer"]
            for parts in zip(
                *(sections.of(each) for each in trio if each is not None), strict=True
            ):
                by_shape[parts[0].shape].append(parts)
        for shape, found in by_shape.items():
            most = max(1, _MOST_ELEMENTS // shape.numel())
            for start in range(0, len(found), most):
                yield list(zip(*found[start : start + most], strict=True))


def _update(
    momenta_S: tuple[Tensor, ...],
    gradients_S: tuple[Tensor, ...],
    divisor: Tensor,
    counts: Tensor,
    rank: int,
    size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the next momentum of a stack, and the updates of this rank's share of it.

    The momentum stays as it is where `counts` is 0.
    """
    gradient_SMN = torch.where(counts > 0, torch.stack(gradients_S) / divisor, 0.0)
    momentum_SMN = torch.stack(momenta_S).lerp(gradient_SMN, counts * (1 - _MOMENTUM))
    nesterov_SMN = gradient_SMN.lerp(momentum_SMN, _MOMENTUM)
    share = -(-len(nesterov_SMN) // size)
    if size > 1:
        nesterov_SMN = F.pad(nesterov_SMN, (0, 0, 0, 0, 0, share * size - len(nesterov_SMN)))
        nesterov_SMN = nesterov_SMN[share * rank : share * (rank + 1)]
    return momentum_SMN, _orthogonal(nesterov_SMN, dtype)


@cache
def _compiled_update() -> Any:
    return torch.compile(_update, dynamic=False)


def _orthogonal(tall_SMN: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrices with the same singular vectors, nearly equal singular values, and a root mean
    square of 1. Singular values near 0 stay smaller, so the root mean square would differ."""
    a, b, c = _COEFFICIENTS
    if dtype == torch.float16:  # gradients may be too small for its range
        tall_SMN = tall_SMN / _norm(tall_SMN)
    tall_SMN = tall_SMN.to(dtype)
    tall_SMN = tall_SMN / _norm(tall_SMN)
    for _ in range(_ROUNDS):
        gram_SNN = torch.bmm(tall_SMN.mT, tall_SMN)
        gram_SNN = torch.baddbmm(gram_SNN, gram_SNN, gram_SNN, beta=b, alpha=c)
        tall_SMN = torch.baddbmm(tall_SMN, tall_SMN, gram_SNN, beta=a)
    rms = _norm(tall_SMN) / math.sqrt(tall_SMN.shape[1] * tall_SMN.shape[2])
    return tall_SMN / rms.clamp(min=_EPSILON)


def _norm(tall_SMN: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix, never 0."""
    norm_S11: Tensor = torch.linalg.vector_norm(tall_SMN, dim=(1, 2), keepdim=True)
    return norm_S11.clamp(min=_EPSILON)
