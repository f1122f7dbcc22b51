"""A process that reads a data set by ranges through a cache, as a loader worker does.

usage: cache_reader.py FOLDER LOG CACHE BOUND DELAY_S SEED EPOCHS
Prints "ready", waits for a line, reads, and prints the sum of the digests of all that it read.
"""

import json
import sys
from pathlib import Path

from support.stores import RangedFolder

from tokenfeed.pipeline.caching.node_cache import CacheSettings
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.planning.policies import Fixed
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.reader import WindowReader


def maker_of(path: StorePath, cache: CacheSettings | None, seed: int = 0) -> WindowMaker:
    """Makes windows of little data."""
    sources = open_splits([path], "train")
    plan = Plan.from_splits(
        sources,
        path,
        Fixed(4),
        split="train",
        micro_batches_per_step=1,
        window_tokens=15_000,
        seed=seed,
        shuffle=True,
    )
    return WindowMaker(plan, WindowReader(sources, cache=cache), 0, 1)


def digest_of(maker: WindowMaker, epochs: int) -> int:
    """The sum of the digests of some epochs."""
    total = 0
    for epoch in range(epochs):
        for window in range(maker.plan.num_windows):
            made = maker.make(Position(epoch, window, 0))
            total += int(made.digests.sum())
    return total % 2**64


def main() -> None:
    folder, log, cache, bound, delay_s, seed, epochs = sys.argv[1:]
    store = RangedFolder(Path(folder), Path(log), float(delay_s))
    settings = CacheSettings(cache, int(bound), is_whole=False, windows_ahead=2)
    maker = maker_of(store, settings, int(seed))
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(digest_of(maker, int(epochs))), flush=True)


if __name__ == "__main__":
    main()
