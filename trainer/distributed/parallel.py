"""The weights of several ranks: the same on each by torch's DistributedDataParallel, or sharded by
torch's FSDP2.

Gradients are summed over ranks, never averaged: the loop divides by the number of targets. Only
runs on several ranks import this module: torch's part of it takes a second.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tokenfeed.trainer.distributed.world import World, is_sharded_tensor

Input = TypeVar("Input")
Output = TypeVar("Output")

_BUFFERS: dict[str, Any] = {"forward_sync_buffers": False}
if "forward_sync_buffers" not in inspect.signature(DistributedDataParallel).parameters:
    _BUFFERS = {"broadcast_buffers": False}  # torch 2.12 and earlier


class Replicas:
    """The same weights on each rank, and the sums of their gradients.

    Gradients are summed bucket by bucket, while the backward pass goes on. What is left to wait for
    when the last gradient is computed is communication for the stall meter.

    A weight that no rank uses in a step gets no gradient, as with one rank. For this, gradients
    must be freed after a step: with a gradient of 0, momentum and decay would go on.

    Args:
        model: The model. All ranks get the weights of rank 0.
        compute: Takes the model and an input, and returns tensors to backpropagate from.
    """

    def __init__(self, model: nn.Module, compute: Callable[[nn.Module, Input], Output]) -> None:
        self._when_computed: list[Callable[[], object]] = []
        self._module = DistributedDataParallel(
            _Computation(model, compute),
            **_BUFFERS,
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
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda sums: sums.value()[0])
    return summed


def shard_model(model: nn.Module, world: World, dtype: torch.dtype) -> None:
    """Shard each weight of a model on the host: layer by layer, then the rest as one unit.

    Weights, gradients and optimizer moments are sharded along their first dimension. A layer is
    whole while it computes.

    The layers go to the device one after the other, so that a device never stores more than one
    whole layer beside its shards. The rest stays one unit, since the head may share its weight with
    the embedding. All ranks get the values of rank 0; on other ranks the model may be on the meta
    device.

    Args:
        model: The model, changed in place.
        world: The ranks.
        dtype: Of weights while a layer computes. Shards and sums of gradients stay fp32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    mesh = init_device_mesh(world.device.type, (world.size,))
    # Without a policy, autocast would keep a bf16 copy of every gathered weight for backward.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    blocks = getattr(model, "repeated_blocks", tuple)
    for part in (*blocks(), model):
        _broadcast_to_device(part, world)
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support scaled sums
    if hasattr(model, "hidden"):  # called besides `forward`
        register_fsdp_forward_method(model, "hidden")


def _broadcast_to_device(part: nn.Module, world: World) -> None:
    """Move weights and buffers to the device, with the values of rank 0, unless they are sharded.

    Tied weights stay tied. The old tensors may be on the meta device.
    """
    moved: dict[Tensor, Tensor] = {}
    for module in part.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or is_sharded_tensor(tensor):
                    continue
                if tensor not in moved:
                    moved[tensor] = _on_device(tensor, world.device)
                tensors[name] = moved[tensor]  # type: ignore[assignment]
    world.broadcast(list(moved.values()))


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    old = tensor.detach()
    new = torch.empty_like(old, device=device) if old.is_meta else old.to(device)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
