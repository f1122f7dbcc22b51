"""`transformers.Trainer` over ShardLoaders.

    settings = TrainingArguments("runs/first", max_steps=1000, gradient_accumulation_steps=4)
    loader = ShardLoader("out/", batching=Padded(16_384), device=settings.device, epochs=None,
                         micro_batches_per_step=4 * settings.world_size)
    ShardTrainer(model=model, args=settings, train_dataset=loader).train()

Make the TrainingArguments first, because they start torch.distributed. Use `epochs=None`, because
the Trainer treats an empty pass as the end of the data. The Trainer must not split, move or skip
batches: the loader delivers this rank's batches, on the device, from the saved position.

    Trainer(..., callbacks=[StallCallback()])    # any Trainer, any data: where does its time go?
"""

import json
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer_utils import get_last_checkpoint

from tokenfeed.integrations.dataloader import StatefulShardLoader, checked_loader
from tokenfeed.integrations.packed import check_documents_apart, has_neighbors
from tokenfeed.integrations.stall import MeterOfEvents
from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.trainer.stall import StallReport

_STATE_FILE = "loader.json"


class ShardTrainerMixin:
    """A mixin for any `transformers.Trainer` that trains and evaluates on ShardLoaders.

    Each checkpoint includes the state of the training loader, which is equal on all ranks. Every
    evaluation starts from the beginning. Before the first step on packed rows, the model is
    checked with `check_documents_apart`, unless FSDP or DeepSpeed has wrapped it.
    """

    args: Any
    train_dataset: Any
    eval_dataset: Any
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
        self.args.ignore_data_skip = True  # the loader continues at its position
        self.add_callback(_LoaderState())  # type: ignore[attr-defined]

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

    def get_train_dataloader(self) -> Any:
        """Return the loader's own batches, because `accelerator.prepare` would split them again.

        The returned loader has no `set_epoch`: after a resume, the Trainer would call this method
        with an earlier epoch.
        """
        return StatefulShardLoader(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader itself. Trainer also calls this with a name, or without a value."""
        if isinstance(eval_dataset, str):
            return self.eval_dataset[eval_dataset]
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        return checked_loader("eval_dataset", given, self.args.device, self.train_dataset)

    get_test_dataloader = get_eval_dataloader

    def get_batch_samples(self, *args: Any) -> Any:
        """Return the batches, and at least 1 as the number of targets, the divisor of the loss."""
        batches, targets = super().get_batch_samples(*args)  # type: ignore[misc]
        return batches, targets if targets is None else targets.clamp(min=1)

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
