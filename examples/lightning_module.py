"""A LightningModule with its own loader; `--resume` goes on with exactly the next batch.

    python examples/lightning_module.py out/ --steps 50
    python examples/lightning_module.py out/ --steps 100 --resume

Lightning saves the state of a loader by itself, but fetches one step ahead of the one it trains, so
that state skips a step. Here the state travels with its gang, and one step is one gang.
"""

import warnings
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import make_model, parse_args

from tokenfeed import Batch, Padded, ShardLoader

Gang = tuple[list[Batch], dict[str, Any]]


class Gangs:
    """The gangs of a loader, each with the loader's state after it."""

    def __init__(self, loader: ShardLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Gang]:
        gang: list[Batch] = []
        for batch in self.loader:
            gang.append(batch)
            if batch.ends_gang:
                yield gang, self.loader.state_dict()
                gang = []


class Model(LightningModule):
    """A small language model and its data."""

    automatic_optimization = False  # Lightning's own would not weigh by targets

    def __init__(self, args: Namespace) -> None:
        super().__init__()
        self.args, self.model = args, make_model(args.data)
        self.loader_state: dict[str, Any] | None = None

    def train_dataloader(self) -> Gangs:
        """Made here, not before: now torch.distributed knows the ranks."""
        args, batching = self.args, Padded(self.args.max_tokens)
        loader = ShardLoader(
            args.data, batching=batching, device=self.device, gang_size=args.gang_size
        )
        if self.loader_state:
            loader.load_state_dict(self.loader_state)
        return Gangs(loader)

    def transfer_batch_to_device(self, batch: Gang, device: Any, dataloader_idx: int) -> Gang:
        """Leave it: it is there."""
        return batch

    def training_step(self, batch: Gang, batch_idx: int) -> None:
        """Train on one gang."""
        gang, self.loader_state = batch
        mine = torch.tensor(sum(part.num_targets for part in gang), device=self.device)
        targets = self.all_gather(mine).sum().clamp(min=1)
        losses = []
        for part in gang:
            loss = self.model(**part, num_items_in_batch=targets).loss
            self.manual_backward(loss * self.trainer.world_size)  # ranks are averaged
            losses.append(loss.detach())
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.print(f"step {self.global_step} loss {self.all_gather(sum(losses)).sum().item():.7f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the position after the gang trained last."""
        checkpoint["loader"] = self.loader_state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it up; `train_dataloader` comes after this."""
        self.loader_state = checkpoint["loader"]


def main() -> None:
    args = parse_args(__doc__)
    warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual")  # it saves after a step
    trainer = Trainer(
        max_steps=args.steps,
        max_epochs=1,  # one pass of the loader, however many epochs that has
        use_distributed_sampler=False,
        callbacks=ModelCheckpoint(
            args.run_dir, "last", every_n_train_steps=args.save_every, enable_version_counter=False
        ),
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(args), ckpt_path=args.run_dir / "last.ckpt" if args.resume else None)


if __name__ == "__main__":
    main()
