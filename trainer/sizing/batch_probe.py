"""`--micro-batch-tokens auto`: find the largest micro-batch that fits, before training.

A trial runs two whole steps of the largest micro-batch of a size, on a separate model that is
thrown away. The first step creates the optimizer's state, and the second has that state from its
start. Trials do not change the run: its steps are the same for every size.
"""

import dataclasses
import gc
import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.feeding.batch_policy import possible_sizes
from tokenfeed.trainer.feeding.loaders import SplitLoaders
from tokenfeed.trainer.optim.gradients import Tally, is_out_of_memory
from tokenfeed.trainer.optim.precision import Precision
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.sizing.batch_search import SHARE_OF_MEMORY, largest_fitting
from tokenfeed.trainer.tasks.registry import task_of

__all__ = ["DeviceMemory", "Memory", "choose_micro_batch", "cpu_size"]

_STEPS = 2
_ON_CPU = 2048

_log = logging.getLogger(__name__)


class Memory(Protocol):
    """The memory of a device, in bytes."""

    def free_bytes(self) -> int:
        """Return the free memory, plus the memory that this process holds."""
        ...

    def reset(self) -> None:
        """Return unused memory to the device, and restart the peak."""
        ...

    def peak_bytes(self) -> int:
        """Return the largest size of all tensors since `reset`."""
        ...


class DeviceMemory:
    """The memory of an accelerator, according to torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, accelerator(device).module

    def free_bytes(self) -> int:
        """Return the driver's free memory plus the allocator's."""
        free, _ = self._module.mem_get_info(self._device)
        return int(free + self._module.memory_reserved(self._device))

    def reset(self) -> None:
        """Empty the allocator's cache, and restart its peak."""
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Return the allocator's peak."""
        return int(self._module.max_memory_allocated(self._device))


def choose_micro_batch(
    config: TrainConfig, world: World, memory: Memory | None = None
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
    task = task_of(config, device)
    sizes = possible_sizes(config, task)
    for_all = [size for size in sizes if _with_size(config, size).accumulation >= world.size]
    sizes = for_all or sizes[:1]
    if device.type == "cpu" and memory is None:
        return _choose(config, cpu_size(sizes), "on a CPU, more gains nothing")
    memory = memory or DeviceMemory(device)
    limit = int(SHARE_OF_MEMORY * memory.free_bytes())
    probe = Probe(_with_size(config, sizes[0]), device, memory)
    found = largest_fitting(probe.bytes_of, sizes, limit, least=task.logits_at_once)
    found = min(world.all_gather(found or 0))  # a rank may have less memory
    del probe
    _release(memory)
    if not found:
        raise ConfigError(
            f"`--micro-batch-tokens`=auto: {sizes[0]} tokens, the fewest that divide a step, do "
            f"not fit into {limit / 2**30:.1f} GiB. Try --recompute full, a smaller "
            "--sequence-length or a smaller --model."
        )
    return _choose(config, found, f"the most that fit into {limit / 2**30:.1f} GiB")


def cpu_size(sizes: Sequence[int]) -> int:
    """Return the size for a CPU. A larger one gains nothing and does not fit the caches."""
    return max((size for size in sizes if size <= _ON_CPU), default=sizes[0])


class Probe:
    """Runs trials on a model that is thrown away."""

    def __init__(self, config: TrainConfig, device: torch.device, memory: Memory) -> None:
        self._config, self._device, self._memory = config, device, memory
        self._precision = Precision(config.precision, device)
        self._task = task_of(config, device)
        self._learner = Learner(config, self._task, self._precision, device)
        self._learner.begin_phase(self._learner.largest_phase)

    def bytes_of(self, tokens: int) -> int | None:
        """Return the peak bytes of steps with a size; None if memory ran out."""
        self._learner.drop_gradients()
        _release(self._memory)
        try:
            self._steps(_with_size(self._config, tokens))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None
        return self._memory.peak_bytes()

    def _steps(self, config: TrainConfig) -> None:
        loaders = SplitLoaders(config, self._task, self._device, self._precision.dtype)
        shown = loaders.largest_blank()
        for step in range(1, _STEPS + 1):
            tally = Tally.zero(self._device)
            for number in range(min(2, config.accumulation)):  # the third is like the second
                prepared = self._task.prepare(shown, number)
                tally.add(self._learner.add_gradients(prepared), 0, 0)
            self._learner.step(step, tally.loss, tally.targets)


def _release(memory: Memory) -> None:
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
