"""A whole loop of your own: training, validation, checkpoints, exact resume, and the stall.

python recipes/own_loop.py out/ --steps 50
python recipes/own_loop.py out/ --steps 100 --resume      # also after kill -9

Replace `make_model` and the optimizer by yours. On several ranks, see docs/how/loop.md.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tokenfeed import Manifest, Padded, ShardLoader, StallMeter
from tokenfeed.integrations.steps import steps


def make_model(manifest: Manifest) -> torch.nn.Module:
    """Return a small Llama, always with the same initial weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=manifest.tokenizer.vocabulary_size,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: ShardLoader) -> float:
    """Return the mean loss of all targets of a split, on the same rows each time."""
    model.eval()
    total, targets = 0.0, 0
    for batch in loader:
        total += model(**batch, num_items_in_batch=1).loss.item()  # a sum
        targets += batch.num_targets
    model.train()
    return total / targets


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
    parser.add_argument("--micro-batches-per-step", type=int, default=4)
    parser.add_argument("--resume", action="store_true", help="from the latest checkpoint")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    batches: dict[str, Any] = {"batching": Padded(args.max_tokens), "device": device}
    loader = ShardLoader(args.data, micro_batches_per_step=args.micro_batches_per_step, **batches)
    validation = None
    if "validation" in loader.manifest.splits:
        small = {"split": "validation", "shuffle": False, "num_workers": 0}
        validation = ShardLoader(args.data, **small, **batches)
    model = make_model(loader.manifest).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoint, done = args.run_dir / "checkpoint.pt", 0
    if args.resume:
        saved = torch.load(checkpoint, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        done = saved["step"]

    meter = StallMeter(device)
    with loader:  # ends its workers
        for number, step in enumerate(meter.watch(steps(loader)), start=done + 1):
            losses, tokens = [], 0
            for batch in step:
                tokens += batch.num_tokens
                loss = model(**batch, num_items_in_batch=step.divisor).loss
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            meter.step(tokens)
            with meter.cause("log"):
                print(f"step {number} loss {sum(losses).item():.7f}")
            if number % args.save_every == 0:
                with meter.cause("checkpoint"):
                    states = {name: part.state_dict() for name, part in parts.items()}
                    save(checkpoint, states | {"step": number})
                if validation:
                    with meter.cause("evaluation"):
                        print(f"step {number} validation loss {evaluate(model, validation):.4f}")
            if number >= args.steps:
                break
    print(loader.stats())
    report = meter.report()  # where did the time go?
    print(report)
    print(report.write(args.run_dir))  # the page


if __name__ == "__main__":
    main()
