"""`--micro-batch-tokens auto`: find the largest micro-batch that fits, in at most four trials.

A trial runs two whole steps of the largest micro-batch of a size, on a separate model that is
thrown away. The first step creates the optimizer's state, and the second has that state from its
start. Trials do not change the run: its steps are the same for every size.

Peak memory is a constant plus a number of bytes per token. Two small trials measure both. A third
tries the largest size that should fit. A fourth corrects the size if memory grew faster.

Example: the limit is 10 GB. 1,000 tokens take 2 GB and 2,000 tokens take 3 GB, so 9,000 tokens
    should take 10 GB. If they take 12 GB, the line from 2,000 to 9,000 tokens, 9 GB for 7,000
    tokens, puts the limit at 7,444 tokens. The fourth trial takes the largest size up to that.
"""

import dataclasses
import gc
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
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
from tokenfeed.trainer.tasks.registry import task_of

__all__ = [
    "MOST_RUNS",
    "SHARE_OF_MEMORY",
    "DeviceMemory",
    "Memory",
    "choose_micro_batch",
    "cpu_size",
    "largest_fitting",
]

MOST_RUNS = 4
SHARE_OF_MEMORY = 0.92
"""Share of the free memory to use. The rest is for gaps between blocks, and for libraries."""
_AFTER_FAILURE = 0.9


def largest_fitting(
    measure: Callable[[int], int | None], sizes: Sequence[int], limit: int, *, least: int = 1
) -> int | None:
    """Return the largest size that was tried and fits; None if no trial fitted.

    Args:
        measure: Tries a size, and returns its peak bytes; None if memory ran out.
        sizes: The possible sizes, ascending.
        limit: The largest number of bytes that fits.
        least: Below this size, bytes grow faster than above, so the small trials start here.
    """
    search = _BatchSearch(measure, limit)
    first = sizes[min(bisect_left(sizes, least), len(sizes) - 1)]
    if search.fits(first):
        search.fits(sizes[min(bisect_left(sizes, 2 * first), len(sizes) - 1)])
    elif first > sizes[0]:
        search.fits(sizes[0])
    while len(search.bytes) < MOST_RUNS:
        guess = search.guess(sizes)
        if guess is None:
            break
        search.fits(guess)
    return search.best


class _BatchSearch:
    def __init__(self, measure: Callable[[int], int | None], limit: int) -> None:
        self._measure, self._limit = measure, limit
        self.bytes: dict[int, int | None] = {}
        self.best: int | None = None

    def fits(self, size: int) -> bool:
        if size in self.bytes:
            return size == self.best
        found = self.bytes[size] = self._measure(size)
        fits = found is not None and found <= self._limit
        if fits:
            self.best = max(size, self.best or 0)
        return fits

    def guess(self, sizes: Sequence[int]) -> int | None:
        """Return the largest size that should fit, above the best and below all failed ones."""
        if self.best is None:
            return None
        best = self.best
        failed = [size for size in self.bytes if size > best]
        open_ = [size for size in sizes if best < size < min(failed, default=sizes[-1] + 1)]
        estimate = self._estimate(best, failed)
        return max((size for size in open_ if size <= estimate), default=None)

    def _estimate(self, best: int, failed: list[int]) -> float:
        """Return the size at the limit, on the line through two trials."""
        known = sorted((size, found) for size, found in self.bytes.items() if found is not None)
        if len(known) < 2:
            return math.sqrt(best * min(failed)) if failed else math.inf
        around = [pair for pair in known if pair[0] <= best][-1:]
        around += [pair for pair in known if pair[0] > best][:1] or known[-2:-1]
        (one, one_bytes), (other, other_bytes) = around
        slope = max(1e-9, (other_bytes - one_bytes) / (other - one))
        estimate = one + (self._limit - one_bytes) / slope
        out_of_memory = [size for size in failed if self.bytes[size] is None]
        return min([estimate, *(_AFTER_FAILURE * size for size in out_of_memory)])


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
