"""`--micro-batch-tokens auto`: find the largest micro-batch that fits, by bisection.

A trial runs two whole steps of the largest micro-batch of a size, on a separate model that is
thrown away. The first step creates the optimizer's state, and the second has that state from its
start. Trials do not change the run: its steps are the same for every size.
"""

import dataclasses
import gc
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.attention import has_varlen
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.feeding.batch_policy import possible_sizes
from tokenfeed.trainer.feeding.loaders import SplitLoaders
from tokenfeed.trainer.optim.precision import Precision
from tokenfeed.trainer.optim.train_state import Learner, Tally, is_out_of_memory
from tokenfeed.trainer.tasks.registry import task_of

SHARE_OF_MEMORY = 0.92
"""Share of the free memory to use. The rest is for gaps between blocks, and for libraries."""
_STEPS = 2
_ON_CPU = 2048

_log = logging.getLogger(__name__)


def largest_fitting(fits: Callable[[int], bool], sizes: Sequence[int]) -> int | None:
    """Return the largest of the ascending sizes that fits; None if none fits."""
    count = bisect_left(sizes, True, key=lambda size: not fits(size))
    return sizes[count - 1] if count else None


class DeviceMemory:
    """The memory of an accelerator in bytes, according to torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, accelerator(device).module

    def free_bytes(self) -> int:
        """Return the driver's free memory plus the allocator's."""
        free, _ = self._module.mem_get_info(self._device)
        return int(free + self._module.memory_reserved(self._device))

    def reset(self) -> None:
        """Return unused memory to the device, and restart the peak."""
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Return the largest size of all tensors since `reset`."""
        return int(self._module.max_memory_allocated(self._device))


def choose_micro_batch(
    config: TrainConfig, world: World, memory: DeviceMemory | None = None
) -> TrainConfig:
    """Return the settings with a number for `micro_batch_tokens` in place of `auto`.

    All ranks get the same number, and each rank has at least one micro-batch of every step.

    Args:
        config: The settings. A resumed run keeps its number, since its saved position counts
            micro-batches.
        world: The ranks. On a CPU nothing is tried.
        memory: Replaces the memory of the device, for tests.

    Raises:
        ConfigError: Not even the smallest micro-batch fits.
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
    device = world.device
    sizes = possible_sizes(config, task_of(config, device))
    for_all = [size for size in sizes if _with_size(config, size).accumulation >= world.size]
    sizes = for_all or sizes[:1]
    if device.type == "cpu" and memory is None:
        return _choose(config, cpu_size(sizes), "on a CPU, more gains nothing")
    memory = memory or DeviceMemory(device)
    gib = SHARE_OF_MEMORY * memory.free_bytes() / 2**30
    found = largest_fitting(Probe(_with_size(config, sizes[0]), device, memory).fits, sizes)
    found = min(world.all_gather(found or 0))  # a rank may have less memory
    _release(memory)
    if not found:
        raise ConfigError(
            f"`--micro-batch-tokens`=auto: {sizes[0]} tokens, the fewest that divide a step, do "
            f"not fit into {gib:.1f} GiB. Try --recompute full, a smaller "
            "--sequence-length or a smaller --model."
        )
    return _choose(config, found, f"the most that fit into {gib:.1f} GiB")


def cpu_size(sizes: Sequence[int]) -> int:
    """Return the size for a CPU. A larger one gains nothing and does not fit the caches."""
    return max((size for size in sizes if size <= _ON_CPU), default=sizes[0])


def trial_step(
    learner: Learner, like: MicroBatch, shape: tuple[int, int], parts: int, number: int
) -> None:
    """Run a step of up to two micro-batches of a shape. A third one would need no more memory."""
    tally = Tally.zero(like.ids_BT.device)
    for part in range(min(2, parts)):
        shown = learner.task.prepare(like.blank_like(*shape), part)
        tally.add(learner.add_gradients(shown), 0, 0)
        del shown
    learner.step(number, tally.loss, tally.targets)


class Probe:
    """Runs trials on a model that is thrown away."""

    def __init__(self, config: TrainConfig, device: torch.device, memory: DeviceMemory) -> None:
        self._config, self._device, self._memory = config, device, memory
        self._limit = SHARE_OF_MEMORY * memory.free_bytes()
        self._precision = Precision(config.precision, device)
        self._learner = Learner(config, task_of(config, device), self._precision, device)
        self._learner.begin_phase(self._learner.largest_phase)

    def fits(self, tokens: int) -> bool:
        """Return whether steps with a size fit into memory."""
        return self.bytes_of(tokens) <= self._limit

    def bytes_of(self, tokens: int) -> float:
        """Return the peak bytes of steps with a size; infinity if memory ran out."""
        self._learner.drop_gradients()
        _release(self._memory)
        config = _with_size(self._config, tokens)
        try:
            varlen = has_varlen(self._device, self._precision.dtype)
            loaders = SplitLoaders(config, self._learner.task, self._device, varlen=varlen)
            like, shape = loaders.first(), loaders.largest_shape()
            for number in range(1, _STEPS + 1):
                trial_step(self._learner, like, shape, config.accumulation, number)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return math.inf
        return self._memory.peak_bytes()


def _release(memory: DeviceMemory) -> None:
    gc.collect()
    memory.reset()


def _with_size(config: TrainConfig, tokens: int) -> TrainConfig:
    """Return the settings of a trial. It does not scale the learning rate, which would be logged
    early."""
    return dataclasses.replace(
        config, micro_batch_tokens=tokens, learning_rate_reference_tokens=None
    )


def _choose(config: TrainConfig, tokens: int, reason: str) -> TrainConfig:
    _log.info("--micro-batch-tokens %d: %s", tokens, reason)
    return dataclasses.replace(config, micro_batch_tokens=tokens)
