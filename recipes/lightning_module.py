"""Lightning on shards; `--resume` goes on with exactly the next step.

python recipes/lightning_module.py out/ --steps 50
python recipes/lightning_module.py out/ --steps 100 --resume
"""

import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import make_model, parse_args

from tokenfeed import Batch, Padded
from tokenfeed.integrations.lightning import ShardDataModule, StallCallback
from tokenfeed.integrations.steps import Step


class Model(LightningModule):
    """A small language model."""

    automatic_optimization = False  # Lightning's own would not weigh by targets

    def __init__(self, data: Path) -> None:
        super().__init__()
        self.model = make_model(data)

    def training_step(self, step: Step, index: int) -> None:
        """Train on the micro-batches of one optimizer step."""
        losses = []
        for batch in step:
            loss = self.model(**batch, num_items_in_batch=step.divisor).loss
            self.manual_backward(loss)
            losses.append(loss.detach())
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.print(f"step {self.global_step} loss {self.all_gather(sum(losses)).mean().item():.7f}")

    def validation_step(self, batch: Batch, index: int) -> None:
        """Log the mean loss of the targets of the whole split."""
        targets = batch.num_targets  # a filler has none
        loss = self.model(**batch, num_items_in_batch=max(1, targets)).loss
        self.log("validation_loss", loss, batch_size=targets, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    args = parse_args(__doc__)
    warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual")  # it saves after a step
    checkpoints = ModelCheckpoint(
        args.run_dir, "last", every_n_train_steps=args.save_every, enable_version_counter=False
    )
    stall = StallCallback(tokens=lambda step: sum(batch.num_tokens for batch in step))
    trainer = Trainer(
        max_steps=args.steps,
        max_epochs=1,  # one pass of the loader, however many epochs that has
        use_distributed_sampler=False,
        callbacks=[stall, checkpoints],
        logger=False,
        enable_progress_bar=False,
    )
    data = ShardDataModule(
        args.data,
        batching=Padded(args.max_tokens),
        micro_batches_per_step=args.micro_batches_per_step,
        validation="validation",
    )
    latest = args.run_dir / "last.ckpt" if args.resume else None
    trainer.fit(Model(args.data), data, ckpt_path=latest)


if __name__ == "__main__":
    main()
