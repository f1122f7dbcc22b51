"""`transformers.Trainer` over shards; `--resume` goes on with exactly the next batch.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py out/ --steps 50

The Trainer must not prepare, move or skip batches: they come dealt to ranks, on the device, and
from the saved position. It counts the targets of a step itself, over all ranks.
"""

import json
from pathlib import Path
from typing import Any

from tiny import make_model, parse_args
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tokenfeed import Padded, ShardLoader


class ShardTrainer(Trainer):
    """A Trainer whose batches come from ShardLoaders."""

    def __init__(self, train: ShardLoader, validation: ShardLoader | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.train_loader, self.validation_loader = train, validation
        self.add_callback(LoaderState(train))

    def get_train_dataloader(self) -> Any:
        """Not through `accelerator.prepare`."""
        return self.train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The validation split."""
        return self.validation_loader

    def _prepare_inputs(self, inputs: Any) -> Any:
        return dict(inputs)  # they are on the device

    def get_batch_samples(self, *args: Any) -> Any:
        """Count 1 target where there is none, as in rows of one token: no division by 0."""
        batches, targets = super().get_batch_samples(*args)
        return batches, targets if targets is None else targets.clamp(min=1)


class LoaderState(TrainerCallback):
    """Puts the loader's state into each checkpoint, and prints the loss."""

    def __init__(self, loader: ShardLoader) -> None:
        self.loader = loader

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One file for all ranks: the state does not depend on them."""
        if args.should_save:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / "loader.json").write_text(json.dumps(self.loader.state_dict()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Say where the run stands."""
        for name in {"loss", "eval_loss"} & logs.keys() if args.should_log else ():
            print(f"step {state.global_step} {name} {logs[name]:.7f}")


def main() -> None:
    args = parse_args(__doc__)
    settings = TrainingArguments(  # starts torch.distributed, so loaders come after it
        str(args.run_dir),
        max_steps=args.steps,
        save_steps=args.save_every,
        lr_scheduler_type="constant",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        ignore_data_skip=True,  # the loader begins where it stopped
    )
    settings.gradient_accumulation_steps = max(1, args.gang_size // settings.world_size)
    batches = {"batching": Padded(args.max_tokens), "device": settings.device}
    train = ShardLoader(args.data, gang_size=args.gang_size, epochs=None, **batches)
    validation = None
    if "validation" in train.manifest.splits:
        validation = ShardLoader(args.data, split="validation", shuffle=False, **batches)
    trainer = ShardTrainer(train, validation, model=make_model(args.data), args=settings)
    checkpoint = get_last_checkpoint(args.run_dir) if args.resume else None
    if checkpoint:
        train.load_state_dict(json.loads((Path(checkpoint) / "loader.json").read_text()))
    trainer.train(resume_from_checkpoint=checkpoint)
    if validation:
        trainer.evaluate()
    train.close()


if __name__ == "__main__":
    main()
