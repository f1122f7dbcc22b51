"""Predict the peak memory of a step on any machine, with tensors that have shapes but no values.

The steps run on the host in the number format of the GPU: operators, dtypes and the tensors kept
for the backward pass are the same as on the GPU, so the memory is the same too. Attention counts as
the GPU's fused attention. Storages are counted as operators make them, rounded up to 512 bytes as
an allocator does. Not counted: memory that kernels use while they run, the CUDA context, and gaps
between an allocator's blocks. A compiled model needs less.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.trainer.config.run_config import PrecisionName, TrainConfig
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.optim.optimizer import make_optimizer
from tokenfeed.trainer.optim.precision import Precision
from tokenfeed.trainer.optim.train_state import Learner, Tally
from tokenfeed.trainer.tasks.task import Task

_BLOCK_BYTES = 512  # CUDA's allocator rounds up to this


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


_CPU = torch.device("cpu")
_SMALL = 2, 8
"""Rows and length of a micro-batch whose own memory does not matter."""


class SimulatedStep:
    """Runs steps on tensors without values, and counts their memory.

    The model is first built with values, which takes as long as at the start of a run.

    Args:
        config: The settings of the run.
        task: The task.
        precision: The number format of the computation.
        like: A micro-batch of the run. Its number of rows and its length do not matter.
    """

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        precision: PrecisionName,
        like: MicroBatch,
    ) -> None:
        self._like = like
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.learner = Learner(config, task, Precision(precision, _CPU), _CPU)
        self.learner.begin_phase(self.learner.largest_phase)
        _drop_values(self.learner.model, self._mode)
        self.learner.optimizer = make_optimizer(
            self.learner.model, config.optimizer, config.weight_decay
        )
        self._memory = PeakBytes()
        with self._mode, self._memory:
            for tensor in (*self.learner.model.parameters(), *self.learner.model.buffers()):
                self._memory.add(tensor)
            self._step(_SMALL, 1, 1)  # creates the optimizer's state

    def peak(self, shape: tuple[int, int], parts: int) -> int:
        """Return the peak bytes of tensors in a step of `parts` micro-batches of a shape."""
        self._memory.reset_peak()
        with self._mode, self._memory:
            self._step(shape, parts, 2)
        return self._memory.peak

    def _step(self, shape: tuple[int, int], parts: int, number: int) -> None:
        """Run a step of up to two micro-batches of a shape. A third one would need no more."""
        tally = Tally.zero(_CPU)
        for _ in range(min(2, parts)):
            tally.add(self.learner.add_gradients(self._like.blank_like(*shape)), 0, 0)
        self.learner.step(number, tally.loss, tally.targets)

    @property
    def state_bytes(self) -> int:
        """Bytes of a checkpoint: the trained weights and the optimizer's state."""
        tensors = [*self.learner.kept_weights().values()]
        for values in self.learner.optimizer.state.values():
            tensors += [value for value in values.values() if isinstance(value, Tensor)]
        return sum(tensor.nbytes for tensor in tensors)


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
