"""Optimizer steps: the micro-batches of each, and the divisor that weighs a loss by targets.

    for step in steps(loader):
        for batch in step.accumulate(model):
            loss = model(**batch, num_items_in_batch=step.divisor).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

Micro-batches hold unequal numbers of targets, so a mean of their means is not the loss of the step.
Here each loss is a sum over its targets, divided by the targets of the whole step. In a loop with a
StallMeter, pass it on: `meter.watch(steps(loader, meter=meter))`.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tokenfeed.integrations.stall import MeterOfEvents
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.trainer.stall import StallMeter

__all__ = ["Step", "steps"]

Meter = StallMeter[Any] | MeterOfEvents


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


def steps(
    loader: ShardLoader,
    *,
    group: "dist.ProcessGroup | None" = None,
    meter: Meter | None = None,
) -> Iterator[Step]:
    """Group the batches of `loader` into optimizer steps, until its pass ends.

    With several ranks, torch.distributed adds up the targets over them, on the device. The host
    does not wait for the sum.

    Args:
        loader: Where the batches come from.
        group: The ranks that `loader` deals to, as its `rank` and `world_size` count them. Default:
            all ranks. With tensor or pipeline parallelism, the data-parallel group.
        meter: The StallMeter of the loop, which then charges the sum, and the wait for ranks that
            are late, to `communication` instead of `data`.

    Raises:
        ConfigError: The group does not have the loader's `world_size` ranks.
    """
    if loader.world_size > 1:
        _check_group(loader.world_size, group)
    return _steps(loader, group, meter)


def _steps(
    loader: ShardLoader,
    group: "dist.ProcessGroup | None",
    meter: Meter | None,
) -> Iterator[Step]:
    batches: list[Batch] = []
    for batch in loader:
        batches.append(batch)
        if batch.ends_step:
            with meter.cause("communication") if meter else contextlib.nullcontext():
                divisor = _divisor(batches, loader, group)
            yield Step(tuple(batches), divisor, loader.state_dict())
            batches = []


def _check_group(ranks: int, group: "dist.ProcessGroup | None") -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"`steps` adds up targets over the loader's `world_size`={ranks} ranks, and "
            "torch.distributed is not running. Call `init_process_group` before."
        )
    if (size := dist.get_world_size(group)) != ranks:
        raise ConfigError(
            f"`group` of `steps` has {size} ranks, the loader deals to `world_size`={ranks}. Pass "
            "the process group of those ranks."
        )


def _divisor(
    batches: list[Batch], loader: ShardLoader, group: "dist.ProcessGroup | None"
) -> torch.Tensor:
    own = sum(batch.num_targets for batch in batches)
    targets = torch.full((), own, dtype=torch.float64, device=loader.device)
    if loader.world_size > 1:
        dist.all_reduce(targets, group=group)
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
