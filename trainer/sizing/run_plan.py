"""What fits the device: the predicted batches and memory of a run, and `--micro-batch-tokens auto`.

Batches are planned from the row lengths in the manifest. One batch is read, to see how documents
share rows. Steps run on tensors without values, so their memory is that of the real operators.
"""

import dataclasses
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.trainer.config.run_config import PrecisionName, TrainConfig
from tokenfeed.trainer.data.attention import Separation, knows_ends
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.feeding.batch_policy import EpochEstimate, possible_sizes
from tokenfeed.trainer.feeding.loaders import SplitLoaders
from tokenfeed.trainer.sensors.gpu_models import Gpu, identify_gpu
from tokenfeed.trainer.sizing.memory_model import SimulatedStep
from tokenfeed.trainer.tasks.registry import task_of

SHARE_OF_MEMORY = 0.92
"""Share of the free memory to use. The rest is for gaps between blocks, and for libraries."""
_CPU = torch.device("cpu")
_ON_CPU = 2048
"""Most tokens of a micro-batch on a CPU. More gain nothing, and do not fit the caches."""

_log = logging.getLogger(__name__)


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU of a device, with the memory that is free; None for a CPU."""
    if device.type == "cpu":
        return None
    here = accelerator(device)
    free, _ = here.module.mem_get_info(device)
    name = str(here.module.get_device_name(device))
    return identify_gpu(name, free, "bf16" if here.has_bfloat16() else "fp16")


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
    gib = SHARE_OF_MEMORY * gpu.gib
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


class RunPlan:
    """The predicted batches, memory and operations of a run.

    Raises:
        ConfigError: Settings contradict each other, or the task.
    """

    def __init__(self, config: TrainConfig, gpu: Gpu | None) -> None:
        self._config, self._gpu = config, gpu
        self.task = task_of(config, _CPU)
        self.precision: PrecisionName = config.precision
        if config.precision == "auto":
            self.precision = gpu.precision if gpu else "fp32"
        loaders = self._loaders(config)
        self._policy = loaders.policy
        self.simulation = SimulatedStep(config, self.task, self.precision, loaders.first())

    def epoch(self) -> EpochEstimate:
        """Return the steps and micro-batches of an epoch."""
        return EpochEstimate.of_split(self.task.manifest.split("train"), self._policy, self._config)

    def flops_per_token(self) -> float:
        """Return the floating-point operations to train one token, in rows of full length."""
        return self.simulation.learner.operations_per_token(self.shape(self._config)[1])

    def peak(self, config: TrainConfig) -> int:
        """Return the peak bytes of a step with the largest micro-batches."""
        return self.simulation.peak(self.shape(config), config.accumulation)

    def fitting(self, sizes: Sequence[int]) -> int | None:
        """Return the tokens of the largest micro-batch that fits the GPU; None if none fits."""
        if self._gpu is None:
            return None
        limit = SHARE_OF_MEMORY * self._gpu.bytes
        return largest_fitting(
            lambda size: self.peak(_with_size(self._config, size)) <= limit, sizes
        )

    def shape(self, config: TrainConfig) -> tuple[int, int]:
        """Return rows and padded length of the largest micro-batch."""
        return self._loaders(config).largest_shape()

    def _loaders(self, config: TrainConfig) -> SplitLoaders:
        """Return the loaders of a run on the GPU, which deliver to the host."""
        fast = self._gpu is not None and self._gpu.precision == "bf16"
        by_ends = fast and self.precision != "fp32" and knows_ends()
        on_gpu = self._gpu is not None
        separation: Separation = "ends" if by_ends else "mask"
        return SplitLoaders(config, self.task, _CPU, separation=separation, on_gpu=on_gpu)
