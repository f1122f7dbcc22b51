"""The feeds of a run: loaders of its splits, and how their batches become micro-batches."""

import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.trainer.batching import is_packed, make_policy
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.micro_batch import Shaper
from tokenfeed.trainer.models.attention import has_varlen
from tokenfeed.trainer.tasks.task import Task

__all__ = ["Feeds"]


class Feeds:
    """Opens the splits of a data set as a run needs them."""

    def __init__(
        self, config: TrainConfig, task: Task, device: torch.device, dtype: torch.dtype
    ) -> None:
        """
        Args:
            config: Says how rows become micro-batches.
            task: Says the same where `config` leaves it open.
            device: Where batches go.
            dtype: What attention is computed in.

        Raises:
            ConfigError: Settings contradict each other, or the task.
        """
        self._config, self._task, self._device = config, task, device
        self.shaper = Shaper(
            causal=task.causal,
            apart=_is_apart(config, task),
            varlen=has_varlen(device, dtype),
            least_slots=config.micro_batch_tokens if config.compile else 0,
        )

    def training(self) -> ShardLoader:
        """The train split, shuffled, epoch after epoch."""
        packed = is_packed(self._config, self._task)
        return self._open("train", packed=packed, num_workers=self._num_workers(), epochs=None)

    def whole(self, split: str) -> ShardLoader:
        """A split once, in the batches of its task. It is shuffled too, each time alike: packing in
        the order of length would let the longest documents alone speak for it."""
        return self._open(split, packed=self._task.packs, num_workers=0, epochs=1)

    def _open(
        self, split: str, *, packed: bool, num_workers: int, epochs: int | None
    ) -> ShardLoader:
        config = self._config
        return ShardLoader(
            config.shards,
            batching=make_policy(config, packed=packed, on_gpu=self._device.type != "cpu"),
            split=split,
            device=self._device,
            num_workers=num_workers,
            seed=config.seed,
            epochs=epochs,
        )

    def _num_workers(self) -> int:
        """As told, or 2 for a GPU and none on the CPU, where they would compete with training."""
        if self._config.num_workers is not None:
            return self._config.num_workers
        return 0 if self._device.type == "cpu" else 2


def _is_apart(config: TrainConfig, task: Task) -> bool:
    if config.attention == "auto":
        return task.apart
    if config.attention == "rows" and not task.causal:
        raise ConfigError(
            f"`--attention`: rows is for models that read forwards, and {task.name} looks both "
            "ways: documents would see each other. Leave it out."
        )
    return config.attention == "documents"
