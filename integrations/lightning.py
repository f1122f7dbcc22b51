"""A Lightning data module over ShardLoaders, whose items are optimizer steps.

    class Model(LightningModule):
        automatic_optimization = False  # Lightning's own would not weigh by targets

        def training_step(self, step, index):
            for batch in step:
                loss = self.model(**batch, num_items_in_batch=step.divisor).loss
                self.manual_backward(loss)
            ...

    trainer = Trainer(max_steps=1000, use_distributed_sampler=False)
    trainer.fit(Model(), ShardDataModule("out/", batching=Padded(16_384), micro_batches_per_step=4))

Lightning saves the state of a loader by itself, but fetches one item ahead of the one it trains, so
that state would skip a step. Here the state travels with its step, and the module saves that.
"""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningDataModule

from tokenfeed.integrations.steps import Step, steps
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.pipeline.planning.policy import Batching

__all__ = ["ShardDataModule"]


class ShardDataModule(LightningDataModule):  # type: ignore[misc]  # untyped
    """Trains by steps, validates by batches.

    A checkpoint keeps the position after the step trained last, so that `fit(ckpt_path=...)` goes
    on with exactly the next one.
    """

    def __init__(
        self,
        path: StorePath | Mixture,
        *,
        batching: Batching,
        validation: str | None = None,
        **settings: Any,
    ) -> None:
        """Remember what to load; Lightning asks for the loaders.

        Args:
            path: See `ShardLoader`.
            batching: See `ShardLoader`.
            validation: The split to validate on; None for none.
            settings: Others of `ShardLoader`, for training.
        """
        super().__init__()
        self._path, self._batching, self._settings = path, batching, settings
        self._validation = validation
        self._state: dict[str, Any] | None = None
        self._loaders: list[ShardLoader] = []

    def train_dataloader(self) -> Any:
        """Made here, not before: now torch.distributed knows the ranks."""
        loader = self._loader(**self._settings)
        if self._state:
            loader.load_state_dict(self._state)
        return _Steps(loader)

    def val_dataloader(self) -> Any:
        """The validation split, in the order of its files."""
        return self._loader(split=self._validation, shuffle=False) if self._validation else []

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Leave it, it is there; and remember it, for it is trained next."""
        if isinstance(batch, Step):
            self._state = batch.state
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the step trained last."""
        return {"loader": self._state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it up; `train_dataloader` comes after this."""
        self._state = state_dict["loader"]

    def teardown(self, stage: str) -> None:
        """End the workers."""
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()

    def _loader(self, **settings: Any) -> ShardLoader:
        if self.trainer is None:
            raise ConfigError("ShardDataModule: it has no trainer yet. Give it to `Trainer.fit`.")
        device = self.trainer.strategy.root_device
        loader = ShardLoader(self._path, batching=self._batching, device=device, **settings)
        self._loaders.append(loader)
        return loader


class _Steps:
    """A loader's steps, as often as they are asked for."""

    def __init__(self, loader: ShardLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Step]:
        return steps(self._loader)
