"""Models whose weights are sharded over ranks by torch's FSDP2, and the tensors of such models.

Weights, gradients and optimizer moments are sharded along their first dimension. A layer is whole
while it computes. Gradients are summed over ranks, never averaged: the loop divides by the number
of targets. torch's modules for sharded tensors take seconds to import, so they are imported only if
a model is sharded.
"""

import contextlib
import sys
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.distributed.world import World

__all__ = [
    "check_sharding",
    "full_tensor",
    "is_sharded",
    "local_shard",
    "replicated_scalars",
    "reshard",
    "set_last_backward",
    "shard_model",
]

_FORWARD_METHODS = ("hidden",)
"""Methods of a model that are called besides `forward`."""


def check_sharding(config: TrainConfig, precision: str) -> None:
    """Reject settings that do not work with sharded weights.

    Raises:
        ConfigError: The optimizer is muon, or the precision is fp16.
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
    """Shard each weight: layer by layer, then the rest of the model as one unit.

    The rest stays one unit, since the head may share its weight with the embedding. All ranks must
    start with equal weights.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    blocks = getattr(model, "repeated_blocks", tuple)
    for part in (*blocks(), model):
        fully_shard(part, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support scaled sums
    for name in _FORWARD_METHODS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model's weights are sharded over ranks."""
    return any(map(_is_dtensor, model.parameters()))


def local_shard(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor as it is."""
    share: Tensor = tensor.to_local() if _is_dtensor(tensor) else tensor
    return share


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


def set_last_backward(model: Any, *, last: bool) -> None:
    """Set whether the next backward pass ends a step. Then it sums gradients over ranks."""
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)


def reshard(model: nn.Module) -> None:
    """Free the whole weights that an evaluation has left."""
    if is_sharded(model):
        for module in model.modules():
            getattr(module, "reshard", _nothing)()


def _nothing() -> None:
    pass


def _is_dtensor(tensor: Any) -> bool:
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)
