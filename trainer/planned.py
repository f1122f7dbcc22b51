"""A run that is planned and not made: its batches, and its steps on tensors without values."""

import dataclasses

import torch

from tokenfeed.pipeline.feeding.devices import accelerator, default_device, resolve_device
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.batching import (
    Policy,
    is_packed,
    largest_shape,
    make_policy,
    micro_batch_sizes,
)
from tokenfeed.trainer.config import PrecisionName, TrainConfig
from tokenfeed.trainer.epoch_shapes import EpochShapes
from tokenfeed.trainer.feeds import check_rows, is_apart
from tokenfeed.trainer.fitting import SHARE_OF_MEMORY, largest_fitting
from tokenfeed.trainer.gpus import Gpu, gpu_of, recognized
from tokenfeed.trainer.micro_batch import MicroBatch, Shaper
from tokenfeed.trainer.models.attention import knows_ends
from tokenfeed.trainer.tasks.registry import make_task
from tokenfeed.trainer.weightless import Weightless

__all__ = ["Planned", "find_gpu"]

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
    fast = "bf16" if here.has_bfloat16() else "fp16"
    return recognized(
        here.module.get_device_name(device), total, "bf16" if fast == "bf16" else "fp16"
    )


class Planned:
    """What a run will be, found out piece by piece."""

    def __init__(self, config: TrainConfig, gpu: Gpu | None) -> None:
        self._config, self._gpu = config, gpu
        self._manifest = Manifest.read(config.shards)
        self._task = make_task(config, self._manifest, _CPU)
        check_rows(config, self._task)
        self.precision: PrecisionName = config.precision
        if config.precision == "auto":
            self.precision = gpu.precision if gpu else "fp32"
        self._packed = is_packed(config, self._task)
        self._policy = self._policy_of(config)
        self.like = self._first()
        self.weightless = Weightless(config, self._task, self.precision)

    def shape(self, config: TrainConfig) -> tuple[int, int]:
        """Rows and padded length of the largest micro-batch."""
        longest = self._manifest.split("train").longest_row
        return largest_shape(self._policy_of(config), longest)

    def peak(self, config: TrainConfig) -> int:
        """Bytes of steps of the largest micro-batches; of more than two, the second is like all."""
        return self.weightless.peak(self.like, *self.shape(config), min(2, config.accumulation))

    def fitting(self) -> tuple[int | None, int | None]:
        """Tokens of the largest micro-batch that fits the GPU, and its peak."""
        if self._gpu is None:
            return None, None
        longest = self._manifest.split("train").longest_row
        sizes = micro_batch_sizes(self._config, packed=self._packed, longest=longest)
        peaks: dict[int, int] = {}

        def measure(tokens: int) -> int:
            config = dataclasses.replace(self._config, micro_batch_tokens=tokens)
            peaks[tokens] = self.peak(config)
            return peaks[tokens]

        limit = int(SHARE_OF_MEMORY * self._gpu.bytes)
        found = largest_fitting(measure, sizes, limit, least=self._task.logits_at_once)
        return found, None if found is None else peaks[found]

    def epoch(self) -> EpochShapes:
        """The micro-batches of an epoch."""
        split = self._manifest.split("train")
        return EpochShapes.of_split(split, self._policy, self._config.seed)

    def _policy_of(self, config: TrainConfig) -> Policy:
        return make_policy(config, packed=self._packed, on_gpu=self._gpu is not None)

    def _first(self) -> MicroBatch:
        config, task = self._config, self._task
        fast = self._gpu is not None and self._gpu.precision == "bf16"
        varlen = fast and self.precision != "fp32" and knows_ends()
        shape = Shaper(causal=task.causal, apart=is_apart(config, task), varlen=varlen)
        with ShardLoader(
            config.shards, batching=self._policy, device=_CPU, num_workers=0, seed=config.seed
        ) as feed:
            return shape(next(iter(feed)))
