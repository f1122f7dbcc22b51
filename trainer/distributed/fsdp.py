"""Models whose weights are sharded over ranks by torch's FSDP2, and the tensors of such models.

Weights, gradients and optimizer moments are sharded along their first dimension. A layer is whole
while it computes. Gradients are summed over ranks, never averaged: the loop divides by the number
of targets. torch's modules for sharded tensors take seconds to import, so they are imported only if
a model is sharded.
"""

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from tokenfeed.trainer.distributed.world import World

_FORWARD_METHODS = ("hidden",)
"""Methods of a model that are called besides `forward`."""


def shard_model(model: nn.Module, world: World, dtype: torch.dtype) -> None:
    """Shard each weight of a model on the host: layer by layer, then the rest as one unit.

    The layers go to the device one after the other, so that a device never stores more than one
    whole layer beside its shards. The rest stays one unit, since the head may share its weight with
    the embedding. All ranks get the values of rank 0; on other ranks the model may be on the meta
    device.

    Args:
        model: The model, changed in place.
        world: The ranks.
        dtype: Of weights while a layer computes. Shards and sums of gradients stay fp32.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    # Without a policy, autocast would keep a bf16 copy of every gathered weight for backward.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    blocks = getattr(model, "repeated_blocks", tuple)
    for part in (*blocks(), model):
        _broadcast_to_device(part, world)
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support scaled sums
    for name in _FORWARD_METHODS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def _broadcast_to_device(part: nn.Module, world: World) -> None:
    """Move weights and buffers to the device, with the values of rank 0, unless they are sharded.

    Tied weights stay tied. The old tensors may be on the meta device.
    """
    moved: dict[Tensor, Tensor] = {}
    for module in part.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or _is_dtensor(tensor):
                    continue
                if tensor not in moved:
                    moved[tensor] = _on_device(tensor, world.device)
                tensors[name] = moved[tensor]  # type: ignore[assignment]
    world.broadcast(list(moved.values()))


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    old = tensor.detach()
    new = torch.empty_like(old, device=device) if old.is_meta else old.to(device)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model's weights are sharded over ranks."""
    return any(map(_is_dtensor, model.parameters()))


def full_tensor(tensor: Any) -> Tensor:
    """Return the whole tensor of a DTensor, on every rank; any other tensor as it is."""
    full: Tensor = tensor.full_tensor() if _is_dtensor(tensor) else tensor
    return full


def replicated_scalars(tensors: list[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which plain tensors count as equal on all ranks, if others are
    sharded."""
    if not any(map(_is_dtensor, tensors)):
        return contextlib.nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()


def reshard(model: nn.Module) -> None:
    """Free the whole weights that an evaluation has left."""
    if is_sharded(model):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _is_dtensor(tensor: Any) -> bool:
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)
