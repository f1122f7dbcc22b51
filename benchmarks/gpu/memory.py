"""The memory of a step, predicted on a machine without a GPU.

Steps run on the host, on tensors that have shapes but no values, in the number format of the GPU:
operators, dtypes and the tensors kept for the backward pass are the same as on the GPU, so the
memory is the same too. Attention counts as the GPU's fused attention. Not counted: memory that
kernels use while they run, the CUDA context, and gaps between an allocator's blocks.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.attention import Separation, knows_ends
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.loop.loaders import SplitLoaders
from tokenfeed.trainer.optim.optimizer import make_optimizer
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.step import Tally, add_gradients, update
from tokenfeed.trainer.tasks.registry import task_of

__all__ = ["PeakBytes", "RunPlan"]

_BLOCK_BYTES = 512  # CUDA's allocator rounds up to this
_CPU = torch.device("cpu")
_SMALL = 2, 8
"""Rows and length of a micro-batch whose own memory does not matter."""


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the bytes of tensors that this thread creates on a type of device.

    with PeakBytes("cuda") as memory:
        step()
    print(memory.peak)
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._device_type = device_type
        self._known: set[int] = set()

    def add(self, tensor: torch.Tensor) -> None:
        """Count an existing tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = round_up(storage.nbytes(), _BLOCK_BYTES)
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size).atexit = False

    def reset_peak(self) -> None:
        """Restart the peak from the current size."""
        self.peak = self.now

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor) and value.device.type == self._device_type:
                self.add(value)
        return out

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class RunPlan:
    """The predicted memory of a run. The model is first built with values.

    Args:
        config: The settings, with a number format.
        on_gpu: Whether the run is on a GPU that separates documents by their ends.
    """

    def __init__(self, config: TrainConfig, *, on_gpu: bool) -> None:
        self.task, self._on_gpu = task_of(config, _CPU), on_gpu
        self._like = self._loaders(config).first()
        self._mode, self._memory = FakeTensorMode(allow_non_fake_inputs=True), PeakBytes()
        self.learner = Learner(config, self.task, World(_CPU))
        model = self.learner.model
        _drop_values(model, self._mode)
        self.learner.optimizer = make_optimizer(model, config.optimizer, config.weight_decay)
        with self._mode, self._memory:
            for tensor in (*model.parameters(), *model.buffers()):
                self._memory.add(tensor)
            self._step(_SMALL, 1)  # creates the optimizer's state

    def peak(self, config: TrainConfig) -> int:
        """Return the peak bytes of tensors in a step with the largest micro-batches."""
        shape = self.shape(config)
        self._memory.reset_peak()
        with self._mode, self._memory:
            self._step(shape, config.accumulation)
        return self._memory.peak

    def shape(self, config: TrainConfig) -> tuple[int, int]:
        """Return rows and padded length of the largest micro-batch."""
        training, _ = self._loaders(config).largest()
        rows, length = training.ids_BT.shape
        return rows, length

    def _step(self, shape: tuple[int, int], parts: int) -> None:
        """Run a step of up to two micro-batches of a shape. A third one would need no more."""
        tally = Tally()
        for _ in range(min(2, parts)):
            tally.add(add_gradients(self.learner, self._like.blank_like(*shape)))
        update(self.learner, 1, tally.loss, tally.targets)

    def _loaders(self, config: TrainConfig) -> SplitLoaders:
        by_ends = self._on_gpu and config.precision != "fp32" and knows_ends()
        separation: Separation = "ends" if by_ends else "mask"
        return SplitLoaders(config, self.task, _CPU, separation=separation)


def _drop_values(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace a model's tensors by fake ones with their shape and dtype. Keep tied weights tied."""
    made: dict[int, nn.Parameter] = {}
    for part in model.modules():
        for name, value in part._parameters.items():
            if value is not None and id(value) not in made:
                bare = mode.from_tensor(value.detach())
                made[id(value)] = nn.Parameter(bare, value.requires_grad)
            part._parameters[name] = None if value is None else made[id(value)]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else mode.from_tensor(buffer)
