"""A checkpoint that rank 0 reads and all ranks get: the folder need not be on every machine."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from tokenfeed.trainer.checkpoints.checkpoint_format import join, split
from tokenfeed.trainer.distributed.world import State, World

__all__ = ["shared_state"]

Meta = TypeVar("Meta")


def shared_state(world: World, load: Callable[[], tuple[Meta, State]]) -> tuple[Meta, State]:
    """What `load` gives on rank 0."""
    if world.size == 1:
        return load()
    tensors: dict[str, Tensor] = {}

    def described() -> tuple[Meta, State, dict[str, tuple[torch.dtype, torch.Size]]]:
        meta, state = load()
        rest, found = split(state)
        tensors.update(found)
        return meta, rest, {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()}

    meta, rest, kinds = world.from_main(described)
    for name, (dtype, shape) in kinds.items():
        if name not in tensors:
            tensors[name] = torch.empty(shape, dtype=dtype, device=world.device)
    world.share([tensors[name] for name in kinds])
    return meta, join(rest, tensors)
