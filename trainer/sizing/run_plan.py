"""`--micro-batch-tokens auto`: the largest micro-batch whose predicted memory fits the GPU.

One batch is read, to see how documents share rows.
"""

import dataclasses
import logging
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.trainer.config.run_config import PrecisionName, TrainConfig
from tokenfeed.trainer.data.attention import Separation, knows_ends
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.feeding.batch_policy import possible_sizes
from tokenfeed.trainer.feeding.loaders import SplitLoaders
from tokenfeed.trainer.optim.optimizer import make_optimizer
from tokenfeed.trainer.optim.precision import Precision
from tokenfeed.trainer.optim.train_state import Learner, Tally
from tokenfeed.trainer.tasks.registry import task_of

_SHARE_OF_MEMORY = 0.92
"""Share of the free memory to use. The rest is for gaps between blocks, and for libraries."""
_BLOCK_BYTES = 512  # CUDA's allocator rounds up to this
_CPU = torch.device("cpu")
_SMALL = 2, 8
"""Rows and length of a micro-batch whose own memory does not matter."""
_ON_CPU = 2048
"""Most tokens of a micro-batch on a CPU. More gain nothing, and do not fit the caches."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gpu:
    """The figures of a GPU that predict a run."""

    free_bytes: int
    """Memory that is free before the run."""
    precision: Literal["bf16", "fp16"] = "bf16"
    """The number format in which the GPU is fast."""


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU of a device; None for a CPU."""
    if device.type == "cpu":
        return None
    here = accelerator(device)
    free, _ = here.module.mem_get_info(device)
    return Gpu(free, "bf16" if here.has_bfloat16() else "fp16")


def largest_fitting(fits: Callable[[int], bool], sizes: Sequence[int]) -> int | None:
    """Return the largest of the ascending sizes that fits; None if none fits."""
    count = bisect_left(sizes, True, key=lambda size: not fits(size))
    return sizes[count - 1] if count else None


def choose_micro_batch(config: TrainConfig, world: World, gpu: Gpu | None) -> TrainConfig:
    """Return the settings with a number for `micro_batch_tokens` in place of `auto`.

    All ranks get the same number, and each rank has at least one micro-batch of every step.

    Args:
        config: The settings. A resumed run keeps its number, since its saved position counts
            micro-batches.
        world: The ranks.
        gpu: The GPU of this rank; None on a CPU.

    Raises:
        ConfigError: Not even the smallest micro-batch fits, or this cannot be predicted.
    """
    if config.micro_batch_tokens != "auto":
        return config
    begun = world.from_rank_0(lambda: TrainConfig.of_run(config.run_dir)) if config.resume else None
    if begun is not None:
        return _choose(config, begun.micro_batch_slots, "as when the run began")
    if config.shard_model and world.size > 1:
        raise ConfigError(
            "`--micro-batch-tokens`=auto does not work with --shard-model. Give a number, or leave "
            "--shard-model out."
        )
    sizes = possible_sizes(config, task_of(config, _CPU))
    for_all = [size for size in sizes if _with_size(config, size).accumulation >= world.size]
    sizes = for_all or sizes[:1]
    if gpu is None:
        size = max((size for size in sizes if size <= _ON_CPU), default=sizes[0])
        return _choose(config, size, "on a CPU, more gains nothing")
    try:
        found = RunPlan(_with_size(config, sizes[0]), gpu).fitting(sizes)
    except RuntimeError as error:  # the model looks at values, which are not there
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"`--micro-batch-tokens`=auto: the memory of --model {config.model} cannot be "
            f"predicted ({reason}). Give a number."
        ) from error
    found = min(world.all_gather(found or 0))  # a rank may have less memory
    gib = _SHARE_OF_MEMORY * gpu.free_bytes / (1 << 30)
    if not found:
        raise ConfigError(
            f"`--micro-batch-tokens`=auto: {sizes[0]} tokens, the fewest that divide a step, do "
            f"not fit into {gib:.1f} GiB. Try --recompute, a smaller --sequence-length or a "
            "smaller --model."
        )
    return _choose(config, found, f"the most that fit into {gib:.1f} GiB")


def _choose(config: TrainConfig, tokens: int, reason: str) -> TrainConfig:
    _log.info("--micro-batch-tokens %d: %s", tokens, reason)
    return _with_size(config, tokens)


def _with_size(config: TrainConfig, tokens: int) -> TrainConfig:
    return dataclasses.replace(config, micro_batch_tokens=tokens)


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
    """The predicted memory of a run.

    Steps run on the host, on tensors that have shapes but no values, in the number format of the
    GPU: operators, dtypes and the tensors kept for the backward pass are the same as on the GPU, so
    the memory is the same too. Attention counts as the GPU's fused attention. Not counted: memory
    that kernels use while they run, the CUDA context, and gaps between an allocator's blocks. A
    compiled model needs less. The model is first built with values, which takes as long as at the
    start of a run.

    Raises:
        ConfigError: Settings contradict each other, or the task.
    """

    def __init__(self, config: TrainConfig, gpu: Gpu | None) -> None:
        self._config, self._gpu = config, gpu
        self.task = task_of(config, _CPU)
        self.precision: PrecisionName = config.precision
        if config.precision == "auto":
            self.precision = gpu.precision if gpu else "fp32"

        self._like = self._loaders(config).first()
        self._mode, self._memory = FakeTensorMode(allow_non_fake_inputs=True), PeakBytes()
        self.learner = Learner(config, self.task, Precision(self.precision, _CPU), _CPU)
        model = self.learner.model
        _drop_values(model, self._mode)
        self.learner.optimizer = make_optimizer(model, config.optimizer, config.weight_decay)
        with self._mode, self._memory:
            for tensor in (*model.parameters(), *model.buffers()):
                self._memory.add(tensor)
            self._step(_SMALL, 1)  # creates the optimizer's state

    def peak(self, config: TrainConfig) -> int:
        """Return the peak bytes of tensors in a step with the largest micro-batches."""
        self._memory.reset_peak()
        with self._mode, self._memory:
            self._step(self.shape(config), config.accumulation)
        return self._memory.peak

    def fitting(self, sizes: Sequence[int]) -> int | None:
        """Return the tokens of the largest micro-batch that fits the GPU; None if none fits."""
        if self._gpu is None:
            return None
        limit = _SHARE_OF_MEMORY * self._gpu.free_bytes
        return largest_fitting(
            lambda size: self.peak(_with_size(self._config, size)) <= limit, sizes
        )

    def shape(self, config: TrainConfig) -> tuple[int, int]:
        """Return rows and padded length of the largest micro-batch."""
        return self._loaders(config).largest_shape()

    def _step(self, shape: tuple[int, int], parts: int) -> None:
        """Run a step of up to two micro-batches of a shape. A third one would need no more."""
        tally = Tally.zero(_CPU)
        for _ in range(min(2, parts)):
            tally.add(self.learner.add_gradients(self._like.blank_like(*shape)), 0, 0)
        self.learner.step(1, tally.loss, tally.targets)

    def _loaders(self, config: TrainConfig) -> SplitLoaders:
        """Return the loaders of a run on the GPU, which deliver to the host."""
        fast = self._gpu is not None and self._gpu.precision == "bf16"
        by_ends = fast and self.precision != "fp32" and knows_ends()
        on_gpu = self._gpu is not None
        separation: Separation = "ends" if by_ends else "mask"
        return SplitLoaders(config, self.task, _CPU, separation=separation, on_gpu=on_gpu)


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
