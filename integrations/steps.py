"""Optimizer steps: the micro-batches of each, and the number that makes a loss weigh by targets.

    for step in steps(loader):
        for batch in step.accumulate(model):
            loss = model(**batch, num_items_in_batch=step.divisor).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

Micro-batches hold unequal numbers of targets, so a mean of their means is not the loss of the step.
Here each loss is a sum over its targets, divided by the targets of the whole step.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.loader import ShardLoader

__all__ = ["Step", "steps"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank trains on before the optimizer's next step; iterating gives its batches."""

    batches: tuple[Batch, ...]
    """The micro-batches of this rank: as many as every other rank has."""
    divisor: torch.Tensor
    """Targets of the step over all ranks, at least 1, divided by the number of ranks, for DDP and
    FSDP average the gradients of the ranks. Shape (), on the loader's device."""
    state: dict[str, Any]
    """The loader's state behind this step: a checkpoint saved after the step belongs with it, even
    where a framework has already fetched the next one."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def accumulate(self, model: torch.nn.Module) -> Iterator[Batch]:
        """The batches; ranks exchange the gradients of `model` with the last of them only."""
        *first, last = self.batches
        with _unsynchronized(model):
            yield from first
        yield last


def steps(loader: ShardLoader) -> Iterator[Step]:
    """Group the batches of `loader` into optimizer steps, until its pass ends.

    With several ranks the targets are added up over them by torch.distributed, on the device:
    nothing waits for the sum.
    """
    batches: list[Batch] = []
    for batch in loader:
        batches.append(batch)
        if batch.ends_step:
            yield Step(tuple(batches), _divisor(batches, loader), loader.state_dict())
            batches = []


def _divisor(batches: list[Batch], loader: ShardLoader) -> torch.Tensor:
    own = sum(batch.num_targets for batch in batches)
    targets = torch.full((), own, dtype=torch.float64, device=loader.device)
    if loader.world_size > 1:
        torch.distributed.all_reduce(targets)
    return targets.clamp_(min=1).div_(loader.world_size).float()


@contextlib.contextmanager
def _unsynchronized(model: torch.nn.Module) -> Iterator[None]:
    """Gradients stay on the rank: DDP and FSDP have `no_sync`, FSDP2 a switch, others no ranks."""
    switch: Any = getattr(model, "set_requires_gradient_sync", None)
    no_sync: Any = getattr(model, "no_sync", contextlib.nullcontext)
    if switch is None:
        with no_sync():
            yield
        return
    switch(False)
    try:
        yield
    finally:
        switch(True)
