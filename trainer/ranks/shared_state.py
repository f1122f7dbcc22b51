"""A checkpoint that rank 0 reads and all ranks get: the folder need not be on every machine."""

from collections.abc import Callable
from typing import TypeVar

import torch

from tokenfeed.trainer.checkpoints.tree import State, join, split
from tokenfeed.trainer.ranks.world import World

__all__ = ["shared_state"]

Meta = TypeVar("Meta")


def shared_state(world: World, load: Callable[[], tuple[Meta, State]]) -> tuple[Meta, State]:
    """What `load` gives on rank 0."""
    if world.size == 1:
        return load()
    found = load() if world.is_main else None
    rest, own = split(found[1]) if found else ({}, {})
    kinds = {name: (t.dtype, t.shape) for name, t in own.items()}
    meta, rest, kinds = world.from_main(lambda: (found and found[0], rest, kinds))
    tensors = {
        name: own[name].contiguous()
        if name in own
        else torch.empty(shape, dtype=dtype, device=world.device)
        for name, (dtype, shape) in kinds.items()
    }
    world.share(list(tensors.values()))
    return meta, join(rest, tensors)
