"""One order in one process: what benchmarks/shuffle/ starts for each of its cases.

`order` writes the orders of some epochs, an .npz each; `cost` drains a loader and prints what that
took as one line of JSON.

usage: case.py order SETTINGS FOLDER EPOCHS OUT
       case.py cost SETTINGS FOLDER
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shuffle.metrics import Order
from benchmarks.text_loaders.processes import family_pss

__all__ = ["delivered", "open_loader"]

SAMPLES = 12
"""Of the memory, in an epoch."""


def open_loader(settings: dict[str, Any], folder: Path) -> Any:
    """A ShardLoader; of a mixture, `weights` has the folders and their weights."""
    import tokenfeed

    path: Any = folder
    if "weights" in settings:
        path = tokenfeed.Mixture({folder / name: w for name, w in settings["weights"].items()})
    return tokenfeed.ShardLoader(
        path,
        batching=getattr(tokenfeed, settings["policy"])(*settings["arguments"]),
        window_tokens=settings.get("window_tokens"),
        num_workers=settings.get("workers", 1),
        seed=settings.get("seed", 0),
    )


def delivered(loader: Any) -> Order:
    """What the next epoch gives."""
    parts, sizes, slots = [], [0], 0
    for batch in loader:
        parts.append((batch.rows, batch.piece_lengths, batch.starts == 0))
        sizes.append(len(batch.rows))
        slots += batch.num_slots
    rows, tokens, whole = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Order(rows, tokens.astype(np.int64), whole, np.cumsum(sizes), slots)


def cost(loader: Any) -> dict[str, float]:
    """Drain an epoch as fast as it comes, and another one that looks at the memory meanwhile."""
    started = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    first = time.perf_counter()
    batches = tokens = 0
    for batch in iterator:
        batches += 1
        tokens += batch.num_tokens
    taken = time.perf_counter() - first
    peak = 0
    for number, _ in enumerate(loader):
        if number % (batches // SAMPLES) == 0:
            peak = max(peak, family_pss(os.getpid()))
    return {
        "mtok_s": tokens / taken / 1e6,
        "first_batch_s": first - started,
        "memory_mb": peak / 1e6,
    }


def save(orders: list[Order], out: str) -> None:
    for epoch, order in enumerate(orders):
        np.savez(f"{out}-{epoch}.npz", **asdict(order))


def main() -> None:
    action, *arguments = sys.argv[1:]
    loader = open_loader(json.loads(arguments[0]), Path(arguments[1]))
    if action == "cost":
        print(json.dumps(cost(loader)))
    else:
        save([delivered(loader) for _ in range(int(arguments[2]))], arguments[3])


if __name__ == "__main__":
    main()
