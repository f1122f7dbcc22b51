"""The gradients of a step, added up over its micro-batches and over the ranks."""

import torch

from tokenfeed.trainer.learner import Learner
from tokenfeed.trainer.micro_batch import MicroBatch
from tokenfeed.trainer.ranks.shares import is_sharded, sum_with_last
from tokenfeed.trainer.ranks.world import World
from tokenfeed.trainer.stall import StallMeter
from tokenfeed.trainer.tasks.task import Loss
from tokenfeed.trainer.telemetry import Tally

__all__ = ["StepGradients", "is_out_of_memory"]

_SIGNS = ("allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""In errors that torch raises as plain RuntimeErrors."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory was too small, of the host or of the device."""
    is_of_allocator = isinstance(error, torch.OutOfMemoryError)
    return is_of_allocator or any(sign in str(error) for sign in _SIGNS)


class StepGradients:
    """Add up the gradients of one step after the other."""

    def __init__(self, learner: Learner, world: World, stall: StallMeter[object]) -> None:
        self._learner, self._world, self._stall = learner, world, stall
        self._is_sharded = is_sharded(learner.model)

    def add(self, micro_batch: MicroBatch, number: int, *, last: bool) -> Loss:
        """Add those of a micro-batch, which may be the last of its step; return its loss."""
        if self._is_sharded:
            self._meet()
            sum_with_last(self._learner.model, last=last)
        self._learner.draw_for(number)
        return self._learner.add_gradients(micro_batch)

    def add_up(self, tally: Tally) -> None:
        """Make gradients, losses and targets of a step those of all ranks."""
        if self._world.size > 1:
            own = [] if self._is_sharded else self._learner.gradients()
            with self._stall.cause("communication"):
                self._world.add_up([*own, tally.loss, tally.targets])

    def _meet(self) -> None:
        """Wait, in the device's queue, for ranks whose batch is late: where ranks compute together
        this would show as work."""
        with self._stall.cause("communication"):
            self._world.add_up([torch.zeros((), device=self._world.device)])
