"""A run that is planned and not made: its batches, and its steps on tensors without values."""

import dataclasses

import torch

from tokenfeed.pipeline.feeding.devices import accelerator, default_device, resolve_device
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.trainer.batching import (
    Policy,
    is_packed,
    largest_shape,
    long_rows_of,
    make_policy,
    possible_sizes,
)
from tokenfeed.trainer.config import PrecisionName, TrainConfig
from tokenfeed.trainer.data_sets import source_of
from tokenfeed.trainer.epoch_shapes import EpochShapes
from tokenfeed.trainer.feeds import check_rows, is_apart
from tokenfeed.trainer.fitting import SHARE_OF_MEMORY, largest_fitting
from tokenfeed.trainer.gpus import Gpu, gpu_of, recognized
from tokenfeed.trainer.micro_batch import MicroBatch, Shaper
from tokenfeed.trainer.models.attention import knows_ends
from tokenfeed.trainer.probing import size_of_cpu
from tokenfeed.trainer.tasks.registry import task_of
from tokenfeed.trainer.weightless import Weightless

__all__ = ["Planned", "find_gpu", "predict_micro_batch"]

_CPU = torch.device("cpu")


def find_gpu(config: TrainConfig, name: str | None) -> Gpu | None:
    """The GPU of that name or size; without one, that of the run; None where it has none."""
    if name is not None:
        return gpu_of(name)
    device = default_device() if config.device == "auto" else resolve_device(config.device)
    if device.type == "cpu":
        return None
    here = accelerator(device)
    total = here.module.get_device_properties(device).total_memory
    name = str(here.module.get_device_name(device))
    return recognized(name, total, "bf16" if here.has_bfloat16() else "fp16")


def predict_micro_batch(config: TrainConfig, gpu: Gpu | None) -> TrainConfig:
    """The settings with a predicted number where --micro-batch-tokens says auto: the most that fit,
    or the fewest there are."""
    if config.micro_batch_tokens != "auto":
        return config
    sizes = possible_sizes(config, task_of(config, _CPU))
    tokens = size_of_cpu(sizes) if gpu is None else sizes[0]
    config = dataclasses.replace(config, micro_batch_tokens=tokens)
    found, _ = Planned(config, gpu).fitting()
    return dataclasses.replace(config, micro_batch_tokens=found or tokens)


class Planned:
    """What a run will be, found out piece by piece.

    Raises:
        ConfigError: Settings contradict each other, or the task.
    """

    def __init__(self, config: TrainConfig, gpu: Gpu | None) -> None:
        self._config, self._gpu = config, gpu
        self.task = task_of(config, _CPU)
        self.precision: PrecisionName = config.precision
        if config.precision == "auto":
            self.precision = gpu.precision if gpu else "fp32"
        check_rows(config, self.task)
        self._packed = is_packed(config, self.task)
        self._policy = self._policy_of(config)
        self.like = self._first()
        self.weightless = Weightless(config, self.task, self.precision, self.like)

    def epoch(self) -> EpochShapes:
        """The steps and micro-batches of an epoch."""
        split, config = self.task.manifest.split("train"), self._config
        return EpochShapes.of_split(split, self._policy, config.seed, config.accumulation)

    def flops_per_token(self) -> float:
        """Floating-point operations to learn one token, in rows of full length."""
        return self.weightless.flops_per_token(self.like, self.shape(self._config)[1])

    def peak(self, config: TrainConfig) -> int:
        """Bytes of a step of the largest micro-batches; beyond two, all are like the second."""
        parts = min(2, config.accumulation)
        return self.weightless.peak(self.like, *self.shape(config), parts)

    def fitting(self) -> tuple[int | None, int | None]:
        """Tokens of the largest micro-batch that fits the GPU, and its peak."""
        if self._gpu is None:
            return None, None
        peaks: dict[int, int] = {}

        def measure(tokens: int) -> int:
            config = dataclasses.replace(self._config, micro_batch_tokens=tokens)
            peaks[tokens] = self.peak(config)
            return peaks[tokens]

        limit = int(SHARE_OF_MEMORY * self._gpu.bytes)
        found = largest_fitting(
            measure,
            possible_sizes(self._config, self.task),
            limit,
            least=self.task.logits_at_once,
        )
        return found, None if found is None else peaks[found]

    def shape(self, config: TrainConfig) -> tuple[int, int]:
        """Rows and padded length of the largest micro-batch."""
        longest = self.task.manifest.split("train").longest_row
        return largest_shape(self._policy_of(config), longest)

    def _policy_of(self, config: TrainConfig) -> Policy:
        long_rows = long_rows_of(config, self.task.manifest)
        on_gpu = self._gpu is not None
        return make_policy(config, packed=self._packed, on_gpu=on_gpu, long_rows=long_rows)

    def _first(self) -> MicroBatch:
        """The run's first micro-batch: it says how documents lie in rows."""
        config, task = self._config, self.task
        fast = self._gpu is not None and self._gpu.precision == "bf16"
        varlen = fast and self.precision != "fp32" and knows_ends()
        shape = Shaper(causal=task.causal, apart=is_apart(config, task), varlen=varlen)
        source = source_of(config.shards)
        with ShardLoader(
            source, batching=self._policy, device=_CPU, num_workers=0, seed=config.seed
        ) as feed:
            return shape(next(iter(feed)))
