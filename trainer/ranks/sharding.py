"""A model of which each rank keeps a share, by torch's FSDP2.

Weights, gradients and moments are cut along their first dimension. A layer is whole while it
computes. Gradients are summed over ranks, never averaged: the loop divides by targets.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.ranks.world import World

__all__ = ["check_sharding", "shard_model"]

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
