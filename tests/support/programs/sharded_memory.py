"""Measures which weights a sharded model on ranks of the CPU keeps whole, in bf16. Prints a JSON
list: for each rank the bytes of whole weights that are left after a forward pass, and the bytes of
weights, gradients and moments of a step.

python sharded_memory.py SHARDS FOLDER RANKS
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.processes import free_ports
from support.training import make_config
from torch import Tensor

from tokenfeed.trainer.distributed.world import join_world
from tokenfeed.trainer.loop.loaders import SplitLoaders
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.step import update
from tokenfeed.trainer.tasks.registry import task_of


def measure(shards: Path, folder: Path) -> dict[str, int]:
    config = make_config(shards, folder / "run", model="mini", precision="bf16", shard_model=True)
    world = join_world("cpu")
    task = task_of(config, world.device)
    learner = Learner(config, task, world)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16 and tensor.dim() == 2:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    loaders = SplitLoaders(config, task, world.device)
    shown, _ = loaders.largest()
    shapes = {weight.shape for weight in learner.model.parameters() if weight.dim() == 2}
    shapes |= {shape[::-1] for shape in shapes}
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, learner.precision.autocast():
        loss = task.loss(learner.model, shown)
    weights = [tensor for tensor in kept.values() if tensor.shape in shapes]
    parameters = sum(weight.numel() for weight in learner.model.parameters())
    left = sum(tensor.untyped_storage().size() for tensor in weights)
    loss.sum.backward()
    own = [weight.to_local() for weight in learner.model.parameters()]
    own += [weight.grad.to_local() for weight in learner.model.parameters()]
    update(learner, 1, loss.sum.detach(), loss.targets)
    for moments in learner.optimizer.state.values():
        own += [moments[name].to_local() for name in ("exp_avg", "exp_avg_sq")]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in own}
    stored = sum(storage.nbytes() for storage in storages.values())
    return {"kept": left, "parameters": parameters, "stored": stored}


def main(shards: str, folder: str, size: int) -> None:
    torch.set_num_threads(1)  # no threads, which forks would lack
    own = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports()[0]}
    os.environ |= {name: str(value) for name, value in own.items()}
    rank = next((rank for rank in range(1, size) if os.fork() == 0), 0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    found: list[dict[str, int]] = [{} for _ in range(size)]
    own_found = measure(Path(shards), Path(folder))
    dist.all_gather_object(found, own_found)
    if rank:
        os._exit(0)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
