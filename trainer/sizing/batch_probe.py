"""`--micro-batch-tokens auto`: the largest micro-batch that fits, tried before training.

Each try is two whole steps of the largest micro-batch that a size makes, on a learner of its own
that is thrown away: the first makes the optimizer's state, the second has it from its beginning.
The run then begins as if nothing had been; its steps are the same for every size.
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

__all__ = ["DeviceMemory", "Memory", "decide_micro_batch", "size_of_cpu"]

_STEPS = 2
_ON_CPU = 2048

_log = logging.getLogger(__name__)


class Memory(Protocol):
    """What a device says of its memory, in bytes."""

    def free_bytes(self) -> int:
        """What this process may take, what it has taken included."""
        ...

    def forget(self) -> None:
        """Give back what no tensor uses; peaks count from now on."""
        ...

    def peak_bytes(self) -> int:
        """The most that tensors took since `forget`."""
        ...


class DeviceMemory:
    """That of an accelerator, by torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, accelerator(device).module

    def free_bytes(self) -> int:
        """What the driver has, and what the allocator holds."""
        free, _ = self._module.mem_get_info(self._device)
        return int(free + self._module.memory_reserved(self._device))

    def forget(self) -> None:
        """Empty the allocator's cache."""
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """As the allocator counts."""
        return int(self._module.max_memory_allocated(self._device))


def decide_micro_batch(
    config: TrainConfig, world: World, memory: Memory | None = None
) -> TrainConfig:
    """The settings with a number of tokens where they say `auto`: one for all ranks, of which each
    has a micro-batch of every step.

    Args:
        config: Of the run. One that goes on keeps its number: a saved position counts by it.
        world: Where it trains. On a CPU none is tried.
        memory: Stands in for that of the device.

    Raises:
        ConfigError: Not even the smallest fits.
    """
    if config.micro_batch_tokens != "auto":
        return config
    begun = world.from_rank_0(lambda: TrainConfig.of_run(config.run_dir)) if config.resume else None
    if begun is not None:
        return _decided(config, begun.micro_batch_slots, "as the run was begun")
    if config.shard_model and world.size > 1:
        raise ConfigError(
            "`--micro-batch-tokens`=auto: with --shard-model nothing is tried: give a number, or "
            "leave --shard-model out."
        )
    device = world.device
    task = task_of(config, device)
    sizes = _sizes_for(world.size, config, possible_sizes(config, task))
    if device.type == "cpu" and memory is None:
        return _decided(config, size_of_cpu(sizes), "on a CPU more bring nothing")
    memory = memory or DeviceMemory(device)
    limit = int(SHARE_OF_MEMORY * memory.free_bytes())
    probe = _Probe(_sized(config, sizes[0]), device, memory)
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
    return _decided(config, found, f"the most that fit into {limit / 2**30:.1f} GiB")


def size_of_cpu(sizes: Sequence[int]) -> int:
    """What a CPU gets: more brings it nothing, and takes its caches."""
    return max((size for size in sizes if size <= _ON_CPU), default=sizes[0])


def _sizes_for(ranks: int, config: TrainConfig, sizes: list[int]) -> list[int]:
    """Those that make a micro-batch of a step for every rank."""
    enough = [size for size in sizes if _sized(config, size).accumulation >= ranks]
    return enough or sizes[:1]


class _Probe:
    """Tries sizes on a learner that is thrown away."""

    def __init__(self, config: TrainConfig, device: torch.device, memory: Memory) -> None:
        self._config, self._device, self._memory = config, device, memory
        self._precision = Precision(config.precision, device)
        self._task = task_of(config, device)
        self._learner = Learner(config, self._task, self._precision, device)
        self._learner.begin_phase(self._learner.largest_phase)

    def bytes_of(self, tokens: int) -> int | None:
        """The most bytes of steps of that size; None where there were not enough."""
        self._learner.drop_gradients()
        _release(self._memory)
        try:
            self._steps(_sized(self._config, tokens))
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
    memory.forget()


def _sized(config: TrainConfig, tokens: int) -> TrainConfig:
    """The settings to try a size with; how the learning rate is scaled is told later."""
    return dataclasses.replace(
        config, micro_batch_tokens=tokens, learning_rate_reference_tokens=None
    )


def _decided(config: TrainConfig, tokens: int, reason: str) -> TrainConfig:
    _log.info("--micro-batch-tokens %d: %s", tokens, reason)
    return dataclasses.replace(config, micro_batch_tokens=tokens)
