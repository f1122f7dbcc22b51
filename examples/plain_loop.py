"""A loop of your own: gradient accumulation, checkpoints, and going on exactly where it stopped.

python examples/plain_loop.py out/ --steps 50
python examples/plain_loop.py out/ --steps 100 --resume
"""

import os
from pathlib import Path
from typing import Any

import torch
from tiny import make_model, parse_args

from tokenfeed import Padded, ShardLoader, StallMeter
from tokenfeed.integrations.steps import steps


def main() -> None:
    args = parse_args(__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(args.data).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = ShardLoader(
        args.data,
        batching=Padded(args.max_tokens),
        device=device,
        micro_batches_per_step=args.micro_batches_per_step,
    )
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
            if number >= args.steps:
                break
    print(loader.stats())
    print(meter.report())  # where did the time go?


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all: a crash leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
