"""Models whose weights are sharded over ranks by torch's FSDP2.

Weights, gradients and optimizer moments are sharded along their first dimension. A layer is whole
while it computes. Gradients are summed over ranks, never averaged: the loop divides by the number
of targets. Only runs with --shard-model import this module: torch's part of it takes a second.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from tokenfeed.trainer.distributed.world import World, is_sharded_tensor


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
    if hasattr(model, "hidden"):  # called besides `forward`
        register_fsdp_forward_method(model, "hidden")


def _broadcast_to_device(part: nn.Module, world: World) -> None:
    """Move weights and buffers to the device, with the values of rank 0, unless they are sharded.

    Tied weights stay tied. The old tensors may be on the meta device.
    """
    moved: dict[Tensor, Tensor] = {}
    for module in part.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or is_sharded_tensor(tensor):
                    continue
                if tensor not in moved:
                    moved[tensor] = _on_device(tensor, world.device)
                tensors[name] = moved[tensor]  # type: ignore[assignment]
    world.broadcast(list(moved.values()))


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    old = tensor.detach()
    new = torch.empty_like(old, device=device) if old.is_meta else old.to(device)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
