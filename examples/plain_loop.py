"""A loop of your own: gradient accumulation, checkpoints, and going on exactly where it stopped.

    python examples/plain_loop.py out/ --steps 50
    python examples/plain_loop.py out/ --steps 100 --resume

A step is one gang: micro-batches whose rows are of nearly equal length. Each loss is divided by the
targets of the whole gang, so every token counts the same, whichever micro-batch it came in.
"""

import os
from pathlib import Path
from typing import Any

import torch
from tiny import make_model, parse_args

from tokenfeed import Padded, ShardLoader


def main() -> None:
    args = parse_args(__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(args.data).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = ShardLoader(
        args.data, batching=Padded(args.max_tokens), device=device, gang_size=args.gang_size
    )

    checkpoint, step = args.run_dir / "checkpoint.pt", 0
    if args.resume:
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]

    gang = []
    with loader:  # ends its workers
        for batch in loader:
            gang.append(batch)
            if not batch.ends_gang:
                continue
            targets = max(1, sum(part.num_targets for part in gang))
            losses = []
            for part in gang:
                loss = model(**part, num_items_in_batch=targets).loss
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            gang, step = [], step + 1
            print(f"step {step} loss {sum(losses).item():.7f}")
            if step % args.save_every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(checkpoint, state | {"loader": loader.state_dict(), "step": step})
            if step >= args.steps:
                break
    print(loader.stats())


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
