"""Four ranks of gloo in a mesh: 2 data-parallel ranks, each of 2 context-parallel ranks. Prints as
a line of JSON what each rank received, and losses of the mesh and of one process.

python mesh_ranks.py SHARDS FOLDER
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.delivery import Span, spans
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import cross_entropy

from tokenfeed import Batch, Packed, ShardLoader, ranks_of
from tokenfeed.integrations.steps import Step, steps

RANKS, LENGTH, WIDTH, VOCABULARY, STEPS, ROUNDS = 4, 32, 8, 1000, 4, 5


def opened(shards: str, ranks: tuple[int, int]) -> ShardLoader:
    """One sequence a micro-batch, four micro-batches a step."""
    batching = Packed(LENGTH, 1, last="fill")
    settings: dict[str, Any] = {"num_workers": 0, "micro_batches_per_step": 4}
    settings |= {"rank": ranks[0], "world_size": ranks[1]}
    return ShardLoader(shards, batching=batching, window_tokens=500, **settings)


def of_ranks(value: Any) -> list[Any]:
    """The value of each rank."""
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def rows_of(batches: Iterable[Batch]) -> list[list[Span]]:
    return [[] if batch.is_filler else spans(batch) for batch in batches]


class Gathered(torch.autograd.Function):
    """The slices of all ranks of a group, one after the other."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, part = group, part.contiguous()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Model(torch.nn.Module):
    """One layer of causal attention inside documents. `gather` returns the whole sequence."""

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor] = lambda part: part) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gather = gather
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.places = torch.nn.Embedding(LENGTH, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.tokens(ids) + self.places(positions)
        query, key, value = self.qkv(hidden).chunk(3, -1)
        key, value, before, same = map(self.gather, (key, value, positions, documents))
        is_seen = (documents[..., None] == same[:, None]) & (
            positions[..., None] >= before[:, None]
        )
        scores = (query @ key.mT).masked_fill(~is_seen, -torch.inf)
        logits: torch.Tensor = self.out(scores.softmax(-1) @ value)
        return logits


def backward(model: Model, step: Step, mesh: DeviceMesh | None) -> torch.Tensor:
    """Add the gradients of the step; return its loss. Context-parallel ranks take their slices."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in step:
        ids, targets = batch.input_ids, batch.targets
        buffers = [ids, targets, batch.position_ids, batch.seq_idx]
        if mesh is None:
            loss = _summed(model, *buffers) / step.divisor
            loss.backward()
        else:
            with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1, 1]):
                assert ids.shape == targets.shape == (1, LENGTH // 2)
                loss = _summed(model, *buffers) / step.divisor * mesh["cp"].size()
                loss.backward()
            assert ids.shape == targets.shape == (1, LENGTH)
        total += loss.detach()
    return total


def _summed(
    model: Model,
    ids: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor,
    documents: torch.Tensor,
) -> torch.Tensor:
    logits = model(ids, positions, documents).flatten(0, 1)
    return cross_entropy(logits, targets.flatten(), reduction="sum")


def train(model: Model, made: Iterable[Step], mesh: DeviceMesh | None) -> list[float]:
    """Losses of a few steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    for step in islice(made, STEPS):
        values = [backward(model, step, mesh)]
        values += [each.grad for each in model.parameters() if each.grad is not None]
        if mesh is not None:  # averaged, as DDP and FSDP do
            for value in values:
                dist.all_reduce(value)
                value /= RANKS
        losses.append(values[0].item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main(shards: str, folder: Path) -> None:
    torch.set_num_threads(1)  # no threads, which forks would lack
    rank = next((rank for rank in range(1, RANKS) if os.fork() == 0), 0)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    found: dict[str, Any] = {}
    found["whole"] = of_ranks(rows_of(opened(shards, ranks_of(mesh, "dp"))))
    loader = opened(shards, ranks_of(mesh, "dp"))
    found["first"] = of_ranks(rows_of(islice(loader, ROUNDS)))
    found["states"] = of_ranks(loader.state_dict())
    other = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "cp"))
    resumed = opened(shards, ranks_of(other, "dp"))
    resumed.load_state_dict(found["states"][rank])
    found["rest"] = of_ranks(rows_of(resumed))
    cp = mesh.get_group("cp")
    model = Model(lambda part: Gathered.apply(part, cp))
    made = steps(opened(shards, ranks_of(mesh, "dp")), group=mesh.get_group("dp"))
    found["losses"] = of_ranks(train(model, made, mesh))
    dist.destroy_process_group()
    if rank:
        os._exit(0)
    for _ in range(1, RANKS):
        assert os.wait()[1] == 0
    found["alone"] = train(Model(), steps(opened(shards, (0, 1))), None)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
