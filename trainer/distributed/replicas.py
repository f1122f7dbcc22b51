"""Data parallelism by torch's DistributedDataParallel, with sums of gradients in place of means.

Gradients are summed over ranks bucket by bucket, while the backward pass goes on. What is left to
wait for when the last gradient is computed is communication for the stall meter.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Input = TypeVar("Input")
Output = TypeVar("Output")

_NO_UNUSED_WEIGHTS = "find_unused_parameters=True was specified"


class Replicas:
    """The same weights on each rank, and the sums of their gradients.

    A weight that no rank has used keeps the gradient None, as with one rank.

    Args:
        model: The model. All ranks get the weights of rank 0.
        compute: Takes the model and an input, and returns tensors to backpropagate from.
    """

    def __init__(self, model: nn.Module, compute: Callable[[nn.Module, Input], Output]) -> None:
        warnings.filterwarnings("ignore", message=_NO_UNUSED_WEIGHTS)
        self._when_computed: list[Callable[[], object]] = []
        self._module = DistributedDataParallel(
            _Computation(model, compute),
            broadcast_buffers=False,
            # Buckets are not rebuilt after the first step: a resumed run adds in the same order.
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
        )

        self._module.register_comm_hook(self._when_computed, _start_sum)

    def __call__(self, given: Any) -> Any:
        """Return what `compute` returns."""
        return self._module(given)

    def without_sums(self) -> contextlib.AbstractContextManager[None]:
        """Return a context of a forward and a backward pass whose gradients are not summed yet."""
        return self._module.no_sync()

    @contextlib.contextmanager
    def with_sums(self, waiting: contextlib.AbstractContextManager[object]) -> Iterator[None]:
        """Return a context of the last backward pass of a step.

        Args:
            waiting: Entered when the pass has computed all gradients and waits for sums only.
        """
        with contextlib.ExitStack() as stack:
            self._when_computed.append(lambda: stack.enter_context(waiting))
            try:
                yield
            finally:
                self._when_computed.clear()


class _Computation(nn.Module):
    """A function of a model as a module, for DistributedDataParallel."""

    def __init__(self, model: nn.Module, compute: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model, self._compute = model, compute

    def forward(self, given: Any) -> Any:
        return self._compute(self.model, given)


def _start_sum(
    when_computed: list[Callable[[], object]],
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Start to sum a bucket in place. Buckets come in order, so the last one has all the rest."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    if bucket.is_last():
        for call in when_computed:
            call()
    summed: torch.futures.Future[Tensor] = work.get_future().then(_first_value)
    return summed


def _first_value(summed: torch.futures.Future[list[Tensor]]) -> Tensor:
    return summed.value()[0]
