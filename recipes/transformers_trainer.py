"""`transformers.Trainer` over shards; `--resume` goes on with exactly the next batch.

torchrun --nproc-per-node 2 recipes/transformers_trainer.py out/ --steps 50
"""

from typing import Any

from tiny import make_model, parse_args
from transformers import TrainerCallback, TrainingArguments

from tokenfeed import Padded, ShardLoader
from tokenfeed.integrations.transformers import ShardTrainer, StallCallback


class PrintLoss(TrainerCallback):
    """Says where the run stands."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Print what the Trainer logs of losses."""
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
    )
    settings.gradient_accumulation_steps = max(
        1, args.micro_batches_per_step // settings.world_size
    )
    batches = {"batching": Padded(args.max_tokens), "device": settings.device}
    train = ShardLoader(
        args.data, micro_batches_per_step=args.micro_batches_per_step, epochs=None, **batches
    )
    validation = None
    if "validation" in train.manifest.splits:
        validation = ShardLoader(args.data, split="validation", **batches)
    trainer = ShardTrainer(
        model=make_model(args.data),
        args=settings,
        train_dataset=train,
        eval_dataset=validation,
        callbacks=[PrintLoss(), StallCallback()],  # report.json: where does the time go?
    )
    trainer.train(resume_from_checkpoint=args.resume)
    if validation:
        trainer.evaluate()
    train.close()


if __name__ == "__main__":
    main()
