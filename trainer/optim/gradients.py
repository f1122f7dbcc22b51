"""The gradients and the loss of a step, summed over its micro-batches and over the ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.distributed.fsdp import is_sharded
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.stall import StallMeter
from tokenfeed.trainer.tasks.task import Loss

__all__ = ["StepGradients", "Tally", "is_out_of_memory"]

_SIGNS = ("allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words in out-of-memory errors that torch raises as plain RuntimeErrors."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether host or device ran out of memory."""
    is_of_allocator = isinstance(error, torch.OutOfMemoryError)
    return is_of_allocator or any(sign in str(error) for sign in _SIGNS)


@dataclass(slots=True)
class Tally:
    """Sums over micro-batches. Sums that depend on the device stay on the device."""

    loss: Tensor
    targets: Tensor
    tokens: int = 0
    slots: int = 0

    @classmethod
    def zero(cls, device: torch.device) -> "Tally":
        """Return the sums of no micro-batch."""
        loss = torch.zeros((), device=device)
        return cls(loss, torch.zeros((), dtype=torch.int64, device=device))

    def add(self, loss: Loss, tokens: int, slots: int) -> None:
        """Add one micro-batch."""
        self.extend(Tally(loss.sum.detach(), loss.targets, tokens, slots))

    def extend(self, other: "Tally") -> None:
        """Add the sums of another tally."""
        self.loss += other.loss
        self.targets += other.targets
        self.tokens += other.tokens
        self.slots += other.slots


class StepGradients:
    """Adds up the gradients of a step, then those of the next."""

    def __init__(self, learner: Learner, world: World, stall: StallMeter) -> None:
        self._learner, self._world, self._stall = learner, world, stall
        self._is_sharded = is_sharded(learner.model)

    def add(self, micro_batch: MicroBatch, number: int, *, last: bool) -> Loss:
        """Add the gradients of a micro-batch, and return its loss."""
        if self._is_sharded:
            self._meet()
        self._learner.draw_for(number)
        return self._learner.add_gradients(
            micro_batch, last=last, waiting=self._stall.cause("communication")
        )

    def add_up(self, tally: Tally) -> None:
        """Sum losses and targets of a step over the ranks. Gradients are summed already."""
        if self._world.size > 1:
            with self._stall.cause("communication"):
                self._world.all_reduce([tally.loss, tally.targets])

    def _meet(self) -> None:
        """Wait, in the device's queue, for ranks whose batch is late: where ranks compute together
        this would show as work."""
        with self._stall.cause("communication"):
            self._world.all_reduce([torch.zeros((), device=self._world.device)])
