"""Trains under a launcher with one rank whose loader sleeps; that rank writes how long into
slept.json of the run's folder.

python late_rank.py SHARDS RUN_DIR RANK SECONDS STEPS
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.training import make_config

from tokenfeed import ShardLoader
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.trainer.loop.loaders import SplitLoaders
from tokenfeed.trainer.loop.run import train
from tokenfeed.trainer.stall import warmup_steps

_slept: list[float] = []


def make_late(sleep: Callable[[], object]) -> None:
    """Have this process sleep before each micro-batch."""
    train_loader = SplitLoaders.train_loader

    class LateLoader(ShardLoader):
        def __iter__(self) -> Iterator[Batch]:
            for batch in super().__iter__():
                began = time.perf_counter()
                sleep()
                _slept.append(time.perf_counter() - began)
                yield batch

    def late(loaders: SplitLoaders) -> ShardLoader:
        loader = train_loader(loaders)
        loader.__class__ = LateLoader
        return loader

    SplitLoaders.train_loader = late  # type: ignore[method-assign]


def main(shards: str, run_dir: Path, rank: int, seconds: float, steps: int) -> None:
    is_late = int(os.environ["RANK"]) == rank
    if is_late:
        make_late(lambda: time.sleep(seconds))
    settings = {"micro_batch_tokens": 64, "step_tokens": 128, "log_every": 5}
    once = {"eval_every": steps, "save_every": steps}
    train(make_config(shards, run_dir, steps=steps, **settings, **once), bool)
    if is_late:
        measured = _slept[warmup_steps(steps) :]  # one micro-batch a step
        (run_dir / "slept.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    shards, run_dir, rank, seconds, steps = sys.argv[1:]
    main(shards, Path(run_dir), int(rank), float(seconds), int(steps))
