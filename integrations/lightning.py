"""A Lightning data module over ShardLoaders, whose items are optimizer steps.

    class Model(LightningModule):
        automatic_optimization = False  # Lightning would not weight by targets

        def training_step(self, step, index):
            for batch in step:
                loss = self.model(**batch, num_items_in_batch=step.divisor).loss
                self.manual_backward(loss)
            ...

    trainer = Trainer(max_steps=1000, use_distributed_sampler=False)
    trainer.fit(Model(), ShardDataModule("out/", batching=Padded(16_384), micro_batches_per_step=4))

Lightning saves the state of a loader by itself, but fetches one item ahead of the one it trains, so
that state would skip a step. Here the state travels with its step, and the module saves that.

    Trainer(..., callbacks=[StallCallback()])    # any module, any data: where does its time go?
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningDataModule

from tokenfeed.integrations.stall import MeterOfEvents
from tokenfeed.integrations.steps import Step, steps
from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.pipeline.planning.policies import Batching
from tokenfeed.pipeline.planning.stages import Stage, as_one, paths_of
from tokenfeed.trainer.stall import StallReport

Count = Callable[[Any], int] | None
_OF_READING = ("num_workers", "timeout", "cache_dir", "cache_bytes")


class ShardDataModule(LightningDataModule):  # type: ignore[misc]  # untyped
    """Training items are optimizer steps, validation items are batches.

    A checkpoint includes the position after the last trained step, so `fit(ckpt_path=...)`
    continues with exactly the next step.
    """

    def __init__(
        self,
        path: StorePath | Sequence[StorePath] | Mixture | Sequence[Stage],
        *,
        batching: Batching,
        validation: str | None = None,
        **settings: Any,
    ) -> None:
        """Store the settings. Lightning requests the loaders later.

        Args:
            path: See `ShardLoader`.
            batching: See `ShardLoader`.
            validation: The split of all data sets to validate on. None: do not validate.
            settings: Other settings of `ShardLoader`, for training. Validation uses only
                `num_workers`, `timeout`, `cache_dir` and `cache_bytes`.

        Raises:
            ConfigError: The settings have a device.
        """
        if "device" in settings:
            raise ConfigError(
                f"`device`={settings['device']!r}: the batches are on the device of the Trainer. "
                "Leave it out, and choose the device by `Trainer(accelerator=..., devices=...)`."
            )
        super().__init__()
        self._path, self._batching, self._settings = path, batching, settings
        self._validation = validation
        self._read_state: Callable[[], dict[str, Any]] = dict
        self._training: ShardLoader | None = None
        self._opened = ExitStack()

    def train_dataloader(self: Any) -> Any:
        """Make the training loader. torch.distributed is initialized at this point."""
        if self.trainer.ckpt_path and self.trainer.global_step and not self._read_state():
            raise ResumeError("the checkpoint has no state of a ShardDataModule: load only weights")
        self._training = loader = self._loader(self._path, **self._settings)
        return _Steps(loader, self)

    def reweigh(self, weights: Mapping[StorePath, float]) -> int:
        """Change the weights of the present stage, for example by the losses of a validation.

        See `ShardLoader.reweigh`. Every rank must call this after the same step. The step that
        Lightning has fetched in advance stays as it is. Checkpoints have the change. Returns the
        token of the run at which the change begins.

        Raises:
            ConfigError: There is no training loader yet, or the weights cannot change.
        """
        if self._training is None:
            raise ConfigError("`reweigh`: training has not begun. Call it from a hook or a step.")
        return self._training.reweigh(weights)

    def val_dataloader(self) -> Any:
        """Make a loader of the validation split, always shuffled in the same way, so that
        `limit_val_batches` takes rows of all lengths. Every validation starts anew, and reads every
        row of every data set once, whatever the weights of training are."""
        if not self._validation:
            return []
        kept = {name: self._settings[name] for name in _OF_READING if name in self._settings}
        data = Mixture(dict.fromkeys(paths_of(as_one(self._path)), 1.0), exhausted="continue")
        return self._loader(data, split=self._validation, **kept)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Return the batch, which is on the device already, and store the state of its step."""
        if isinstance(batch, Step):
            self._read_state = batch.read_state
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last trained step; before the first step, the loaded
        state, or an empty one."""
        return {"loader": self._read_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store a loaded state. Lightning calls `train_dataloader` after this."""
        self._read_state = state_dict["loader"].copy

    def teardown(self, stage: str) -> None:
        """Stop the workers."""
        self._opened.close()
        self._training = None

    def _loader(self: Any, data: Any, **settings: Any) -> Any:
        device = self.trainer.strategy.root_device
        loader = ShardLoader(data, batching=self._batching, device=device, **settings)
        return self._opened.enter_context(loader)


class _Steps:
    """For each iteration, the steps after the last trained step: Lightning may have fetched more.
    Their sum over ranks is charged in the meter of a StallCallback, if the trainer has one."""

    def __init__(self, loader: ShardLoader, module: Any) -> None:
        self._loader, self._module, self._first = loader, module, loader.state_dict()

    def __iter__(self) -> Iterator[Step]:
        state, trainer = self._module.state_dict()["loader"] or self._first, self._module.trainer
        if trainer.overfit_batches:  # on the same batches in each epoch
            self._loader.rewind()
        elif state != self._loader.state_dict():
            self._loader.load_state_dict(state)
        stalls = (each for each in trainer.callbacks if isinstance(each, StallCallback))
        return steps(self._loader, meter=next((each.meter for each in stalls), None))


class StallCallback(Callback):  # type: ignore[misc]  # untyped
    """Measures the stall of a Lightning trainer. Logs it, and writes report.json and report.html
    into the root folder.

    With several ranks, the report has the readings of all. The time between two batches counts as
    data, except evaluations and checkpoints.
    """

    def __init__(self, tokens: Count = None, slots: Count = None, **settings: Any) -> None:
        """Watch a training.

        Args:
            tokens: Returns the real tokens of a batch.
            slots: Returns the token slots of a batch, padding included. Default: as many as tokens.
            settings: Settings of `StallMeter`.
        """
        self.meter = MeterOfEvents(**settings)
        self._tokens, self._slots, self._steps = tokens, slots or tokens, 0
        self.report: StallReport | None = None
        """Set when training ends."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Wait for the first batch. Charge checkpoints until training ends."""
        self.meter.begin(trainer.strategy.root_device)
        self._steps = trainer.global_step
        self.meter.charge_calls(trainer, "save_checkpoint", "checkpoint")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        """The batch is ready."""
        if self._tokens and self._slots:
            self.meter.count(self._tokens(batch), self._slots(batch))
        self.meter.train()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """The batch is queued, and with it perhaps the step of the optimizer."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self.meter.step()
        self.meter.wait()

    def on_validation_end(self, *_: Any) -> None:
        """Count the time since the last step as evaluation."""
        self.meter.claim("evaluation")

    def on_exception(self, trainer: Any, *_: Any) -> None:
        """Report the measurements of this rank. The other ranks may have ended."""
        self.on_train_end(trainer, has_failed=True)

    def on_train_end(self, trainer: Any, *_: Any, has_failed: bool = False) -> None:
        """Report where the time went."""
        folder = trainer.default_root_dir if trainer.is_global_zero else None
        ended = self.meter.end(folder, is_first=folder is not None, has_failed=has_failed)
        self.report = ended or self.report  # an exception may follow the end of training
