"""`transformers.Trainer` over ShardLoaders.

    settings = TrainingArguments("runs/first", max_steps=1000, gradient_accumulation_steps=4)
    loader = ShardLoader("out/", batching=Padded(16_384), device=settings.device, epochs=None,
                         micro_batches_per_step=4 * settings.world_size)
    ShardTrainer(model=model, args=settings, train_dataset=loader).train()

Make the TrainingArguments first, because they start torch.distributed. Use `epochs=None`, because
the Trainer treats an empty pass as the end of the data. The Trainer must not split, move or skip
batches: the loader delivers this rank's batches, on the device, from the saved position. A step has
`gradient_accumulation_steps` batches in a row. At the end of a pass, batches without labels
complete it.

    Trainer(..., callbacks=[StallCallback()])    # any Trainer, any data: where does its time go?
"""

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.trainer_utils import get_last_checkpoint

from tokenfeed.integrations.dataloader import StatefulShardLoader, checked_loader
from tokenfeed.integrations.packed import check_documents_apart, has_neighbors
from tokenfeed.integrations.stall import MeterOfEvents
from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.schema import IGNORED, is_labelled, refuse_weights
from tokenfeed.trainer.stall import StallReport

_STATE_FILE = "loader.json"
_OF_THE_LOADER = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "dataloader_num_workers"),
    *("dataloader_prefetch_factor", "dataloader_drop_last", "train_sampling_strategy"),
    *("dataloader_persistent_workers", "data_seed", "auto_find_batch_size"),
    *("max_length", "completion_only_loss", "shuffle_dataset", "dataset_text_field"),
    *("dataset_num_proc", "eval_packing"),
)
"""Settings of the Trainer, and of TRL, that a ShardLoader has in its place."""


class _WholeSteps(StatefulShardLoader):
    """The batches of a loader, completed to whole steps at the end of a pass.

    The Trainer counts a step by its number of batches, and after a resume it does not know where a
    pass ends. So batches without labels complete the last step. A Trainer that resumes after its
    last step gets no batch, because it would train on it.
    """

    def __init__(
        self, loader: ShardLoader, size: int, has_ended: Callable[[], bool] = lambda: False
    ) -> None:
        """Wrap a loader for steps of `size` batches on this rank, until `has_ended`."""
        super().__init__(loader, transform=lambda batch: batch)  # the loss masks scores
        self._is_prepared = True
        self._size, self._has_ended = size, has_ended
        self.rows = 0
        """Rows with data that were delivered."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        if self._has_ended():
            return
        place, last = 0, None
        for batch in super().__iter__():
            self.rows += batch.real_rows
            yield batch
            place, last = (place + 1) % self._size, batch
        if place and last is not None:
            yield from [last.without_targets()] * (self._size - place)

    def __len__(self) -> int:
        return ceil_div(super().__len__(), self._size) * self._size


class ShardTrainerMixin:
    """A mixin for any `transformers.Trainer` that trains and evaluates on ShardLoaders.

    Each checkpoint includes the state of the training loader, which is equal on all ranks. Every
    evaluation starts from the beginning. Before the first step on packed rows, the model is
    checked with `check_documents_apart`, unless FSDP or DeepSpeed has wrapped it.

    Losses are means over all targets of a step or an evaluation, on all ranks. For classes, scores
    and tags the Trainer's `compute_loss_func` is set, unless you pass one. `compute_metrics` gets
    every row once: batches without labels and rows of padding are left out.
    """

    args: Any
    train_dataset: Any
    eval_dataset: Any
    compute_loss_func: Any
    packing_tolerance: float | None = 2e-2
    """Tolerance of the check, large enough for TF32 and bf16. None: do not check."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """See `transformers.Trainer`."""
        for name in ("data_collator", "formatting_func"):
            if settings.get(name) is not None:
                raise ConfigError(
                    f"`{name}`: has no effect, because a ShardLoader delivers whole batches. Leave "
                    "it out. To change rows, pass `map` to the loader."
                )
        super().__init__(*args, **settings)
        evaluated = self.eval_dataset
        named = evaluated if isinstance(evaluated, dict) else {"eval_dataset": evaluated}
        for name, loader in {"train_dataset": self.train_dataset, **named}.items():
            if loader is not None:
                checked_loader(name, loader, self.args.device, self.train_dataset)
        if self.train_dataset is not None:
            self._check_training(self.train_dataset)
            if self.compute_loss_func is None:
                refuse_weights(self.train_dataset.manifest.columns, "`train_dataset`")
            if self.compute_loss_func is None and is_labelled(self.train_dataset.manifest.task):
                self.compute_loss_func = self._loss_of_labels
        self._warn_of_unused()
        self.args.ignore_data_skip = True  # the loader continues at its position
        self._real_rows = 0
        self.add_callback(_LoaderState())  # type: ignore[attr-defined]

    def _warn_of_unused(self: Any) -> None:
        """Warn of settings of the Trainer that have no effect, if they are not the defaults."""
        usual = {each.name: each.default for each in dataclasses.fields(self.args)}
        unused = [
            f"{name}={getattr(self.args, name)}"
            for name in _OF_THE_LOADER
            if name in usual and getattr(self.args, name) != usual[name]
        ]
        if unused:
            warnings.warn(
                f"{', '.join(unused)}: not used, because the loader makes the batches. Pass "
                "`batching`, `num_workers`, `seed` and `targets` to ShardLoader instead.",
                stacklevel=3,
            )

    def _check_training(self: Any, loader: ShardLoader) -> None:
        """Reject a loader whose ranks are not those of the Trainer."""
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"`train_dataset`: the Trainer would split batches over {self.args.n_gpu} GPUs of "
                "this process. Start a process for each GPU with torchrun, or set "
                "CUDA_VISIBLE_DEVICES to one GPU."
            )
        config = getattr(self.accelerator, "parallelism_config", None)
        shared = 1 if config is None else config.tp_size * config.cp_size * config.sp_size
        ranks = self.accelerator.num_processes // max(shared, self.get_tp_size())
        if loader.world_size != ranks:
            raise ConfigError(
                f"`train_dataset`: the loader deals its batches to {loader.world_size} ranks, and "
                f"the Trainer has {ranks} data-parallel ranks. Make the loader with "
                f"`world_size`={ranks} and the `rank` among these."
            )

    def _loss_of_labels(
        self: Any, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Return the sum of the losses of all labels, divided by the labels of the whole step."""
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        if labels.is_floating_point():
            is_real = ~labels.isnan()
            errors = logits.float().squeeze(-1) - labels
            total = torch.where(is_real, errors, 0.0).square().sum()
        else:
            is_real = labels != IGNORED
            total = cross_entropy(
                logits.float().flatten(0, -2),
                labels.flatten(),
                reduction="sum",
                label_smoothing=self.args.label_smoothing_factor,
            )
        items = is_real.sum() if num_items_in_batch is None else num_items_in_batch
        return total / items.clamp(min=1)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **settings: Any) -> Any:
        """See `transformers.Trainer.train`.

        Raises:
            ResumeError: The loader's state in the checkpoint is missing or of other data.
            ValueError: No checkpoint exists.
        """
        loader = checked_loader("train_dataset", self.train_dataset, self.args.device, None)
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.args.output_dir)
        if checkpoint:
            path = Path(checkpoint) / _STATE_FILE
            try:
                saved = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                raise ResumeError(
                    f"{path}: the loader's state cannot be read ({error}). Resume from a "
                    "checkpoint that a ShardTrainer has finished."
                ) from error
            loader.load_state_dict(saved)
        return super().train(resume_from_checkpoint, *args, **settings)  # type: ignore[misc]

    def get_train_dataloader(self: Any) -> Any:
        """Return the loader's own batches, because `accelerator.prepare` would split them again.

        The returned loader has no `set_epoch`: after a resume, the Trainer would call this method
        with an earlier epoch.
        """
        size = self.args.gradient_accumulation_steps
        self._trained = _WholeSteps(
            self.train_dataset, size, lambda: 0 < self.state.max_steps <= self.state.global_step
        )
        return self._trained

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader's own batches. Trainer also calls this with a name, or without a
        value."""
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(given, str):
            given = self.eval_dataset[given]
        loader = checked_loader("eval_dataset", given, self.args.device, self.train_dataset)
        return _WholeSteps(loader, 1)

    get_test_dataloader = get_eval_dataloader

    def log(self: Any, logs: dict[str, float], *args: Any, **settings: Any) -> None:
        """See `transformers.Trainer.log`. The Trainer computes rows per second from
        `per_device_train_batch_size`; here they are the rows that the ranks have trained on."""
        name = "train_samples_per_second"
        if name in logs:
            own = torch.tensor(float(self._trained.rows), device=self.args.device)
            rows = self.accelerator.reduce(own, "mean").item() * self.train_dataset.world_size
            logs[name] = round(rows / logs["train_runtime"], 3)
        super().log(logs, *args, **settings)  # type: ignore[misc]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Return the number of targets, the divisor of the loss, and at least 1."""
        counted = [_countable(batch) for batch in batch_samples]
        self._items = items = super()._get_num_items_in_batch(counted, device)  # type: ignore[misc]
        return items if items is None else items.clamp(min=1)

    def compute_loss(
        self: Any,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """See `transformers.Trainer.compute_loss`. TRL does not count the targets of an
        evaluation."""
        if num_items_in_batch is None and not self.model.training:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        return super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs, num_items_in_batch
        )

    def prediction_step(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """See `transformers.Trainer.prediction_step`. The loss is kept for `evaluation_loop`."""
        self._real_rows = inputs.real_rows
        loss, logits, labels = super().prediction_step(  # type: ignore[misc]
            model, inputs, prediction_loss_only, ignore_keys
        )
        if loss is None or self._items is None:
            return loss, logits, labels
        has_all_ranks = self.args.average_tokens_across_devices
        weight = self._items / (self.accelerator.num_processes if has_all_ranks else 1)
        self._evaluated += torch.stack([loss * weight, weight]).double()
        return None, logits, labels

    def evaluation_loop(
        self: Any,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """See `transformers.Trainer.evaluation_loop`. The loss is the mean over all targets."""
        self._evaluated = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        self.gather_function = self._gather_rows
        output = super().evaluation_loop(  # type: ignore[misc]
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        loss, targets = self.accelerator.reduce(self._evaluated).tolist()
        if targets:
            output.metrics[f"{metric_key_prefix}_loss"] = loss / targets
        return output

    def _gather_rows(self: Any, values: Any) -> Any:
        """Return the rows with data of all ranks, for metrics."""
        device = self.args.device
        counts = self.accelerator.gather(torch.tensor([self._real_rows], device=device)).tolist()

        def gather(rows: Tensor) -> Tensor:
            padded = rows.new_zeros((max(counts), *rows.shape[1:]))
            padded[: self._real_rows] = rows[: self._real_rows]
            of_ranks = self.accelerator.gather(padded).split(max(counts))
            return torch.cat([each[:n] for each, n in zip(of_ranks, counts, strict=True)])

        return recursively_apply(gather, values)

    def _prepare_inputs(self: Any, inputs: Any) -> Any:
        if (
            self.packing_tolerance is not None
            and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
            and has_neighbors(inputs)
        ):
            with self.compute_loss_context_manager():
                check_documents_apart(self.model, inputs, tolerance=self.packing_tolerance)
            self.packing_tolerance = None
        return dict(inputs)  # they are on the device


def _countable(batch: Any) -> Any:
    """Return the labels of a batch with scores as the Trainer counts labels: -100 for none."""
    labels = batch.get("labels")
    if labels is None or not labels.is_floating_point():
        return batch
    return {"labels": torch.where(labels.isnan(), IGNORED, 0)}


class ShardTrainer(ShardTrainerMixin, transformers.Trainer):  # type: ignore[misc]  # untyped
    """A `transformers.Trainer` over ShardLoaders."""


class StallCallback(transformers.TrainerCallback):  # type: ignore[misc]  # untyped
    """The stall of a `transformers.Trainer`, logged, and as report.json and report.html in its
    output folder.

    With several ranks, the report has the readings of all. The sum of targets over ranks, which
    waits for late ranks, counts as `communication`. The report has tokens, the mean of the ranks,
    if `include_num_input_tokens_seen` counts them, and padding if it is "non_padding".

    If training ends by an exception, no event follows. Then
    `callback.meter.end(folder, has_failed=True)` returns the report of this rank.
    """

    def __init__(self, **settings: Any) -> None:
        """Args: `settings` of `StallMeter`."""
        self.meter, self._tokens = MeterOfEvents(**settings), 0
        self.report: StallReport | None = None
        """Set when training ends."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the first batches. Until training ends, charge the exchange of target counts
        between ranks to `communication`."""
        self._tokens = int(state.num_input_tokens_seen)  # of the checkpoint
        self.meter.begin(args.device)
        self.meter.charge_calls(
            transformers.Trainer, "_get_num_items_in_batch", "communication", self._evaluates
        )

    def _evaluates(self, trainer: Any, batches: Any, *_: Any) -> bool:
        """Return whether an evaluation, which has an event, needs the batches. Else count slots."""
        evaluates: bool = trainer.control.should_evaluate
        if not evaluates and trainer.args.include_num_input_tokens_seen == "non_padding":
            self.meter.count(0, sum(b["input_ids"].numel() for b in batches if "input_ids" in b))
        return evaluates

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All batches of the step are there."""
        self.meter.train()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The step is queued."""
        before, self._tokens = self._tokens, int(state.num_input_tokens_seen)
        self.meter.step((self._tokens - before) // args.world_size)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """A progress line was written, or the metrics of an evaluation."""
        is_evaluation = any(name.startswith("eval_") for name in logs or ())
        self.meter.claim("evaluation" if is_evaluation else "log")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A batch was evaluated. The metrics of an evaluation are logged at its end."""
        self.meter.claim("evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint was written."""
        self.meter.claim("checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report where the time went."""
        folder = Path(args.output_dir) if args.should_save else None
        self.report = self.meter.end(folder, is_first=args.should_log)


class _LoaderState(transformers.TrainerCallback):  # type: ignore[misc]  # untyped
    """Puts the loader's state into each checkpoint, and counts epochs after a resume."""

    def on_step_end(self, args: Any, state: Any, control: Any, **now: Any) -> None:
        """Set the epoch, which the Trainer counts from the resumed step. With a loader without an
        end, the run is one epoch."""
        if state.num_train_epochs == sys.maxsize:
            state.epoch = state.global_step / state.max_steps
            return
        batches, per_step = len(now["train_dataloader"]), args.gradient_accumulation_steps
        passes, steps = divmod(state.global_step, ceil_div(batches, per_step))
        state.epoch = passes + steps * per_step / batches

    def on_save(self, args: Any, state: Any, control: Any, **now: Any) -> None:
        """Write it by the rank that writes; it is the same on all."""
        if args.should_save:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / _STATE_FILE).write_text(json.dumps(now["train_dataloader"].state_dict()))
