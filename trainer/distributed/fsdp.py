"""Models whose weights are sharded over ranks by torch's FSDP2, and the tensors of such models.

Weights, gradients and moments are cut along their first dimension. A layer is whole while it
computes. Gradients are summed over ranks, never averaged: the loop divides by targets. torch's
modules for sharded tensors take seconds to import, so they are imported only if a model is sharded.
"""

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.distributed.world import State, World

__all__ = [
    "check_sharding",
    "is_sharded",
    "laid_like",
    "of_all",
    "own",
    "reshard",
    "shard_model",
    "sum_with_last",
    "whole",
    "with_shares",
]

_ENTRANCES = ("hidden",)
"""What is called of a model besides itself."""


def check_sharding(config: TrainConfig, precision: str) -> None:
    """Refuse what is not right on shares of weights.

    Raises:
        ConfigError: Muon, or fp16.
    """
    for option, found, refused, remedy in (
        ("optimizer", config.optimizer, "muon", "its products take whole matrices: take adamw"),
        (
            "precision",
            precision,
            "fp16",
            "its scale would differ between ranks: take bf16",
        ),
    ):
        if found == refused:
            raise ConfigError(
                f"`--{option}`={refused}: with --shard-model {remedy}, or leave --shard-model out."
            )


def shard_model(model: nn.Module, world: World) -> None:
    """Keep this rank's share of each weight: first of each layer, then of the rest, which stays
    together, since a head may be the embedding. Weights have to be equal on all ranks."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    blocks = getattr(model, "repeated_blocks", tuple)
    for part in (*blocks(), model):
        fully_shard(part, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums
    for name in _ENTRANCES:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks have shares of it."""
    return any(map(_is_share, model.parameters()))


def own(tensor: Any) -> Tensor:
    """This rank's share of a tensor, or the tensor."""
    share: Tensor = tensor.to_local() if _is_share(tensor) else tensor
    return share


def of_all(tensor: Any) -> Tensor:
    """The tensor of all shares, on every rank."""
    full: Tensor = tensor.full_tensor() if _is_share(tensor) else tensor
    return full


def laid_like(weight: Any, value: Tensor) -> Tensor:
    """A whole tensor in the share, and the order of memory, that a weight has."""
    if not _is_share(weight):
        return torch.empty_like(weight, dtype=value.dtype).copy_(value)
    from torch.distributed.tensor import distribute_tensor

    there = value.to(weight.device)
    return distribute_tensor(there, weight.device_mesh, weight.placements, src_data_rank=None)


def with_shares(tensors: list[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """A context in which plain tensors beside shares count as equal on all ranks."""
    if not any(map(_is_share, tensors)):
        return contextlib.nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()


def sum_with_last(model: Any, *, last: bool) -> None:
    """Say of a sharded model whether the next backward pass ends a step: then gradients are summed
    over ranks."""
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)


def reshard(model: nn.Module) -> None:
    """Let go of weights that an evaluation has left whole."""
    if is_sharded(model):
        for module in model.modules():
            getattr(module, "reshard", _nothing)()


def whole(state: State, world: World) -> State:
    """A state with whole tensors on the host of rank 0, None on others; all ranks take part, tensor
    by tensor. Without shares it is the state."""
    seen: dict[tuple[int, torch.Size], Tensor] = {}

    def walk(value: Any) -> Any:
        if _is_share(value):
            return gathered(value)
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        return value

    def gathered(share: Any) -> Tensor | None:
        full = of_all(share)
        if not world.is_main:
            return None
        key = own(share).data_ptr(), share.shape  # tied weights stay one tensor
        return seen.setdefault(key, full.cpu())

    found: State = walk(state)
    return found


def _nothing() -> None:
    pass


def _is_share(tensor: Any) -> bool:
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)
