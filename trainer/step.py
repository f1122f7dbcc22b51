"""A training step, from batches to new weights. Read it from top to bottom.

    train_steps       the loop: for each step, its micro-batches, then the update
    add_gradients     forward and backward of one micro-batch
    update            the learning rate of the step
    change_weights    the divisor that counts targets
    scale_and_clip    scale, clip, skip or update, free the gradients

The loop moves tensors and decides nothing. It waits for the next batch, and for other ranks; the
host never reads from the device. Everything occasional comes between two steps, in
`trainer/loop/parts.py`. Under `--compile reduce-overhead`, `trainer/step_graphs.py` replays what
`add_gradients` and `change_weights` have queued once.

Gradients are those of the mean over a step's targets, whose number is known only at its end. So
each loss is divided by a constant, and the end of the step multiplies the norm and the gradients by
the constant over the number of targets.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.devices import cuda
from tokenfeed.pipeline.planning.permutation import derive_key
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.distributed.world import World, is_sharded_tensor
from tokenfeed.trainer.models.build import outside_graphs
from tokenfeed.trainer.optim.optimizer import set_learning_rate
from tokenfeed.trainer.optim.precision import Precision
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.stall import Cause
from tokenfeed.trainer.step_graphs import StepGraphs
from tokenfeed.trainer.tasks.task import Loss

_OF_DROPOUT = 1
"""Key of dropout's random numbers, different from the keys of tasks, which have the same seed."""

Bracket = contextlib.AbstractContextManager[object]
Charge = Callable[[Cause], Bracket]
"""Returns a block whose time is charged to a cause of stall, like `StallMeter.cause`."""


def uncharged(cause: Cause) -> Bracket:
    """Return a block that nobody measures."""
    return contextlib.nullcontext()


@dataclass(slots=True)
class Tally:
    """Sums over micro-batches. Sums that depend on the device stay on the device."""

    loss: Tensor = field(init=False)
    targets: Tensor = field(init=False)
    tokens: int = 0
    slots: int = 0
    rows: list[np.ndarray] = field(default_factory=list)
    """The numbers of the rows of each micro-batch."""

    def add(self, loss: Loss) -> None:
        """Add the loss of a micro-batch and its targets."""
        if self.rows:
            self.loss += loss.sum.detach()
            self.targets += loss.targets
        else:  # copies, which no graph overwrites
            self.loss, self.targets = loss.sum.detach().clone(), loss.targets.clone()

    def sum_over(self, world: World) -> None:
        """Sum loss and targets over the ranks by one message. In fp64, no target is lost."""
        both = torch.stack((self.loss.double(), self.targets.double()))
        world.all_reduce([both])
        self.loss, self.targets = both[0].float(), both[1].long()

    def count(self, batch: Batch) -> None:
        """Add the tokens, slots and rows of a micro-batch."""
        self.tokens += batch.num_tokens
        self.slots += 0 if batch.is_filler else batch.num_slots
        self.rows.append(batch.rows)


class Trained(NamedTuple):
    """A step that is done."""

    step: int
    tally: Tally
    """Loss and targets of all ranks; tokens, slots and rows of this one."""
    norm: Tensor
    """The gradient's norm on the device; not finite if the step was skipped."""


def train_steps(
    learner: Learner,
    batches: Iterator[Batch],
    shape: Callable[[Batch], MicroBatch],
    steps: Iterable[int],
    *,
    charge: Charge = uncharged,
    before_update: Callable[[], None] = lambda: None,
) -> Iterator[Trained]:
    """Train, and yield after each step.

    Args:
        learner: The model, its optimizer and its settings.
        batches: This rank's micro-batches, without end. The last one of a step says so.
        shape: Makes a model's input of a batch.
        steps: The numbers of the steps, counted from 1.
        charge: Measures the blocks in which the device may wait.
        before_update: Called before the weights change.
    """
    config, world, device = learner.config, learner.world, learner.device
    of_step = config.accumulation  # micro-batches of all ranks
    add, change = add_gradients, update
    if learner.runs_as_graphs:
        graphs = StepGraphs(learner, add_gradients, change_weights)
        add, change = graphs.add_gradients, graphs.update
    for step in steps:
        tally = Tally()
        number, ends_step = step * of_step + world.rank, False
        while not ends_step:
            with charge("data"):
                batch = next(batches)
            ends_step, micro_batch = batch.ends_step, shape(batch)
            if learner.ranks > 1:  # wait for late ranks here: within the step it would show as work
                with charge("communication"):
                    world.all_reduce([torch.zeros((), device=device)])
            seed_dropout(config.seed, number, device)
            waiting = charge("communication") if learner.replicas else None
            tally.add(add(learner, micro_batch, last=ends_step, waiting=waiting))
            tally.count(batch)
            number += world.size
        if world.size > 1:  # gradients are summed already
            with charge("communication"):
                tally.sum_over(world)
        before_update()
        norm = change(learner, step, tally.loss, tally.targets)
        yield Trained(step, tally, norm)


def seed_dropout(seed: int, number: int, device: torch.device) -> None:
    """Seed dropout for the micro-batch of this number, which counts those of all ranks and steps.
    A resumed run draws the same values."""
    key = derive_key(seed, number, _OF_DROPOUT)
    torch.default_generator.manual_seed(key)  # in microseconds; `torch.manual_seed` takes 100
    if device.type != "cpu":
        cuda.manual_seed(key)


def add_gradients(
    learner: Learner,
    micro_batch: MicroBatch,
    *,
    last: bool = True,
    waiting: Bracket | None = None,
) -> Loss:
    """Compute the loss of a micro-batch, and add its gradients to those of the step.

    The loss is divided by a constant, so that gradients are about those of a mean. With fp16, it is
    multiplied by the scale of the loss too.

    Args:
        learner: The model.
        micro_batch: The micro-batch.
        last: Whether it is the last of its step. Replicas then sum gradients over ranks.
        waiting: Entered while all that is left is to wait for these sums.
    """
    task, model, replicas, precision = (
        learner.task,
        learner.model,
        learner.replicas,
        learner.precision,
    )
    sums: Bracket = contextlib.nullcontext()
    if replicas is not None and last:
        sums = replicas.with_sums(waiting or contextlib.nullcontext())
    elif replicas is not None:
        sums = replicas.without_sums()
    factor = precision.factor(learner.divisor)
    task.factor = factor if isinstance(factor, Tensor) else None  # for `vocabulary_loss`
    task.begin_pass()
    with sums, outside_graphs(model, has_graphs=task.has_graphs):
        with precision.autocast():
            loss: Loss = replicas(micro_batch) if replicas else task.loss(model, micro_batch)
        (loss.sum * factor).backward()  # type: ignore[no-untyped-call]
    return loss


def update(learner: Learner, step: int, loss: Tensor, targets: Tensor) -> Tensor:
    """Update the weights from the gradients of a step, and return the gradient's norm; not finite
    if the step was skipped.

    Args:
        learner: The model and its optimizer.
        step: The step, counted from 1.
        loss: The sum of the losses of all targets. If it is not finite, the step is skipped.
        targets: The number of targets.
    """
    set_learning_rate(learner.optimizer, learner.rate(step))
    return change_weights(learner, loss, targets)


def change_weights(learner: Learner, loss: Tensor, targets: Tensor) -> Tensor:
    """Update the weights at the learning rate that is set; see `update`."""
    # NaN if the loss is not finite: by one kernel, where `isfinite` alone takes four.
    correction = torch.add(learner.divisor / targets.clamp(min=1), loss, alpha=0)
    clip_norm = learner.config.clip_norm
    return scale_and_clip(learner.optimizer, learner.precision, correction, clip_norm)


def scale_and_clip(
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    scale: Tensor | float,
    clip_norm: float,
) -> Tensor:
    """Scale and clip the gradients, update the weights, free the gradients; return the norm before
    clipping. With fp16, also take back the scale of the loss, and update it.

    The norm stays on the device. Where it is not finite, the step is skipped there, without a wait:
    weights, moments and step count stay, and the skip is counted.

    Args:
        optimizer: From `make_optimizer`: one that heeds `grad_scale` and `found_inf`.
        precision: Knows the scale of the loss, and counts skipped steps.
        scale: A number, or a tensor without dimensions that nobody has waited for.
        clip_norm: Longer gradients, after scaling, are shortened to this.
    """
    if precision.is_scaled:
        scale = precision.unscaled(scale)
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    own_norm = nn.utils.get_total_norm(gradients)
    norm = _whole(own_norm) * scale
    # One divisor scales and clips. The optimizer's kernel applies it to what it reads anyway.
    divisor = ((norm + 1e-6) / clip_norm).clamp(min=1.0) / scale
    skip = (norm - norm != 0).float()  # whether it is not finite
    optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    with _replicated_scalars(own_norm):
        optimizer.step()
    optimizer.zero_grad()
    precision.count(skip, scale)
    return norm


def _whole(tensor: Any) -> Tensor:
    """Return a sharded tensor as a whole, on every rank; any other tensor as it is."""
    whole: Tensor = tensor.full_tensor() if is_sharded_tensor(tensor) else tensor
    return whole


def _replicated_scalars(norm: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which plain tensors count as equal on all ranks, if gradients are
    sharded, and with them their norm."""
    if not is_sharded_tensor(norm):
        return contextlib.nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()
