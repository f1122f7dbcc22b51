"""Optimizer steps: the micro-batches of each, and the divisor that weighs a loss by targets.

    for step in steps(loader):
        for batch in step.accumulate(model):
            loss = model(**batch, num_items_in_batch=step.divisor).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

Micro-batches have different numbers of targets, so the mean of their mean losses is not the loss of
the step. Here each loss is a sum over its targets, divided by the targets of the whole step.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tokenfeed.integrations.stall import MeterOfEvents
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.planning.state import resealed
from tokenfeed.trainer.stall import StallMeter
from tokenfeed.trainer.stall.watchers import watching

Meter = StallMeter | MeterOfEvents


@dataclass(frozen=True, slots=True)
class Step:
    """The micro-batches of one rank in one optimizer step. Iterating yields the batches."""

    batches: tuple[Batch, ...]
    """The micro-batches of this rank. All ranks have equally many."""
    divisor: torch.Tensor
    """Targets of the step over all ranks, at least 1, divided by the number of ranks, because DDP
    and FSDP average the gradients of the ranks. Shape (), float32, on the loader's device."""
    read_state: Callable[[], dict[str, Any]]
    """Returns `state`, and holds no batches."""

    @property
    def state(self) -> dict[str, Any]:
        """The loader's state after this step, with the stages that `reweigh` has changed until now.
        Save it with a checkpoint of the step, because a framework may have fetched the next step
        already."""
        return self.read_state()

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def accumulate(self, model: torch.nn.Module) -> Iterator[Batch]:
        """Yield the batches. Only the last one synchronizes the gradients of `model` between
        ranks."""
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

    With several ranks, an all-reduce sums the targets on the device. The host does not wait for it.
    If Ctrl-C or an error interrupts it between the batches of a step, the loader goes back to the
    beginning of the step.

    Args:
        loader: The source of the batches.
        group: Process group of the ranks that share the loader's `world_size`. Default: all ranks.
            With tensor or pipeline parallelism, the data-parallel group.
        meter: The meter that counts the all-reduce, and the wait for slower ranks, as
            `communication`. Default: the StallMeter that watches these steps.

    Raises:
        ConfigError: `loader` is not a ShardLoader, or the group does not have its `world_size`
            ranks.
    """
    if not isinstance(loader, ShardLoader):
        raise ConfigError(
            f"`steps` takes a ShardLoader, not a {type(loader).__name__}. Pass "
            "ShardLoader(path, batching=...) itself."
        )
    if loader.world_size > 1:
        _check_group(loader.world_size, group)
    return _steps(loader, group, meter)


def _steps(
    loader: ShardLoader,
    group: "dist.ProcessGroup | None",
    meter: Meter | None,
) -> Iterator[Step]:
    rest = iter(loader)
    while True:
        with loader._undone_by_errors():
            step = _next_step(rest, loader, group, meter)
        if step is None:
            return
        yield step


def _next_step(
    rest: Iterator[Batch],
    loader: ShardLoader,
    group: "dist.ProcessGroup | None",
    meter: Meter | None,
) -> Step | None:
    """Take the batches of a step; None at the end of the pass."""
    batches: list[Batch] = []
    for batch in rest:
        batches.append(batch)
        if batch.ends_step:
            charged = meter or watching.get()
            with charged.cause("communication") if charged else contextlib.nullcontext():
                divisor = _divisor(batches, loader, group)
            read_state = partial(_state_now, loader, loader.state_dict())
            return Step(tuple(batches), divisor, read_state)
    return None


def _state_now(loader: ShardLoader, after_step: dict[str, Any]) -> dict[str, Any]:
    """Return the state after a step, with the present list of stages.

    `reweigh` changes only windows that the loader has not begun, so both lists have the same past.
    After `load_state_dict` and `rewind`, the state after the step stays as it was.
    """
    now = loader.state_dict()
    if now["plan"] == after_step["plan"]:
        return after_step
    before, plan = after_step["plan"], now["plan"]
    place = ("epoch", "window", "micro_batch")
    has_gone_on = [now[each] for each in place] >= [after_step[each] for each in place]
    if not has_gone_on or plan.get("given") != before.get("given"):
        return after_step
    counted = dict(zip(before["data"], after_step["tokens"], strict=True))
    tokens = [counted[data] for data in plan["data"]]
    return resealed(after_step, plan=plan, tokens=tokens)


def _check_group(ranks: int, group: "dist.ProcessGroup | None") -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"`steps` sums targets over the loader's `world_size`={ranks} ranks, but "
            "torch.distributed is not running. Call `init_process_group` first."
        )
    if (size := dist.get_world_size(group)) != ranks:
        raise ConfigError(
            f"`group` of `steps` has {size} ranks, the loader has `world_size`={ranks}. Pass "
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
    """Disable gradient synchronization: `no_sync` of DDP and FSDP, or the switch of FSDP2."""
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
