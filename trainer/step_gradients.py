"""The gradients of a step, also where a micro-batch turns out too large for the memory.

Then the step is begun again with micro-batches in halves, on the rows that are there already: the
loader's position, the step's rows and its targets stay, and so does what is learnt, but for the
order of sums. The halves last until the run ends; a resumed one tries whole micro-batches again.
"""

import gc
import logging
from collections.abc import Sequence

import torch

from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.trainer.learner import Learner
from tokenfeed.trainer.micro_batch import MicroBatch
from tokenfeed.trainer.ranks.shares import is_sharded, sum_with_last
from tokenfeed.trainer.ranks.world import World
from tokenfeed.trainer.stall import StallMeter
from tokenfeed.trainer.tasks.task import Loss
from tokenfeed.trainer.telemetry import Tally

__all__ = ["StepGradients", "is_out_of_memory"]

_log = logging.getLogger(__name__)

_SIGNS = ("allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""In errors that torch raises as plain RuntimeErrors."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory was too small, of the host or of the device."""
    is_of_allocator = isinstance(error, torch.OutOfMemoryError)
    return is_of_allocator or any(sign in str(error) for sign in _SIGNS)


class StepGradients:
    """Adds up the gradients of one step after the other.

    Keeps the micro-batches of a step until the next begins: ids, labels and masks, no activations.
    """

    def __init__(self, learner: Learner, world: World, stall: StallMeter[object]) -> None:
        self._learner, self._world, self._stall = learner, world, stall
        self._is_sharded = is_sharded(learner.model)
        self._parts = 1
        self._shown: list[tuple[int, MicroBatch]] = []

    def begin(self) -> None:
        """A new step."""
        self._shown = []

    def add(self, micro_batch: MicroBatch, number: int, *, last: bool) -> Loss:
        """Add those of a micro-batch, which may be the last of its step; gives its loss."""
        if self._is_sharded:
            self._meet()
            sum_with_last(self._learner.model, last=last)
        self._shown.append((number, micro_batch))
        loss = self._try(self._shown[-1:])
        while loss is None:
            self._halve()
            loss = self._try(self._shown)  # a backward pass that failed has left some behind
        return loss

    def add_up(self, tally: Tally) -> None:
        """Make gradients, losses and targets of a step those of all ranks."""
        if self._world.size > 1:
            task = self._shown[-1][1].task
            own = [] if self._is_sharded else self._learner.gradients(task)
            with self._stall.cause("communication"):
                self._world.add_up([*own, tally.loss, tally.targets])

    def _meet(self) -> None:
        """Wait, in the device's queue, for ranks whose batch is late: where ranks compute together
        this would show as work."""
        with self._stall.cause("communication"):
            self._world.add_up([torch.zeros((), device=self._world.device)])

    def _try(self, micro_batches: Sequence[tuple[int, MicroBatch]]) -> Loss | None:
        """The loss of the last of them; None where memory was too small, once all that the attempt
        held is free."""
        try:
            losses = [self._in_parts(*numbered) for numbered in micro_batches]
        except RuntimeError as error:
            # With shares of weights ranks compute together: none can begin a step again.
            if (
                self._is_sharded
                or not is_out_of_memory(error)
                or self._parts >= len(micro_batches[-1][1].ids_BT)
            ):
                raise
            return None
        return losses[-1]

    def _in_parts(self, number: int, micro_batch: MicroBatch) -> Loss:
        self._learner.draw_for(number)
        losses = [self._learner.add_gradients(part) for part in micro_batch.parts(self._parts)]
        if len(losses) == 1:
            return losses[0]
        return Loss(
            torch.stack([loss.sum.detach() for loss in losses]).sum(),
            torch.stack([loss.targets for loss in losses]).sum(),
        )

    def _halve(self) -> None:
        self._parts *= 2
        _log.warning(
            "out of memory: micro-batches are computed in %d parts from now on. The steps stay the "
            "same; halve --micro-batch-tokens for the next run",
            self._parts,
        )
        self._learner.drop_gradients()
        gc.collect()
        if self._world.device.type != "cpu":
            accelerator(self._world.device).module.empty_cache()
