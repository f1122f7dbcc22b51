"""A whole loop of your own: training, validation, checkpoints, exact resume, and the stall.

python recipes/own_loop.py out/ --steps 50
python recipes/own_loop.py out/ --steps 100 --resume      # also after kill -9
torchrun --standalone --nproc-per-node 2 recipes/own_loop.py out/ --steps 50

Replace `Model` and the optimizer by yours.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from tokenfeed import Batch, Padded, ShardLoader, StallMeter
from tokenfeed.integrations.steps import steps


class Model(nn.Module):
    """A small causal transformer, always with the same initial weights."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary_size, 64)
        layer = nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, vocabulary_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T, V]. Padding is on the right, so no token attends to it."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.layers(self.embedding(ids), mask, is_causal=True))


def loss_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the sum of the losses of all targets of a batch."""
    logits = model(batch.input_ids).flatten(0, 1)
    return cross_entropy(logits.float(), batch.targets.flatten(), reduction="sum")


def over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the values of all ranks."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


@torch.no_grad()
def evaluate(model: nn.Module, loader: ShardLoader) -> float:
    """Return the mean loss of all targets of a split, over all ranks."""
    model.eval()
    loss, targets = torch.zeros(2, dtype=torch.float64, device=loader.device)
    for batch in loader:
        loss += loss_sum(model, batch)
        targets += batch.num_targets
    model.train()
    return (over_ranks(loss) / over_ranks(targets)).item()


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all: a crash leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data", type=Path, help="output folder of `pretokenize`")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/own"))
    parser.add_argument("--steps", type=int, default=100, help="end after this step")
    parser.add_argument("--save-every", type=int, default=10, help="steps; also evaluates")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a micro-batch")
    parser.add_argument("--micro-batches-per-step", type=int, default=4, help="of all ranks")
    parser.add_argument("--resume", action="store_true", help="from the latest checkpoint")
    args = parser.parse_args()

    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    batches: dict[str, Any] = {"batching": Padded(args.max_tokens), "device": device}
    loader = ShardLoader(args.data, micro_batches_per_step=args.micro_batches_per_step, **batches)
    validation = None
    if "validation" in loader.manifest.splits:
        validation = ShardLoader(args.data, split="validation", num_workers=0, **batches)
    model = Model(loader.manifest.tokenizer.vocabulary_size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoint, done = args.run_dir / "checkpoint.pt", 0
    if args.resume:
        saved = torch.load(checkpoint, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        done = saved["step"]
    show = print if loader.rank == 0 else lambda *_: None
    trained = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model

    meter = StallMeter(device)
    with loader:  # ends its workers
        for number, step in enumerate(meter.watch(steps(loader)), start=done + 1):
            losses, tokens = [], 0
            for batch in step.accumulate(trained):
                tokens += batch.num_tokens
                loss = loss_sum(trained, batch) / step.divisor
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            meter.step(tokens)
            with meter.cause("log"):
                loss = over_ranks(sum(losses)) / loader.world_size
                show(f"step {number} loss {loss.item():.7f}")
            if number % args.save_every == 0 or number == args.steps:
                if loader.rank == 0:
                    with meter.cause("checkpoint"):
                        states = {name: part.state_dict() for name, part in parts.items()}
                        save(checkpoint, states | {"step": number})
                if validation is not None:
                    with meter.cause("evaluation"):
                        show(f"step {number} validation loss {evaluate(model, validation):.4f}")
            if number >= args.steps:
                break
    meter.gather()  # which rank do the others wait for?
    report = meter.report()  # where did the time go?
    show(loader.stats())
    show(report)
    if loader.rank == 0:
        print(report.write(args.run_dir))  # the page
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
