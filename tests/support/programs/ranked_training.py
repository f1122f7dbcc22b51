"""Trains on several ranks in forks of one process, which has torch loaded already, and prints how
they ended as a line of JSON.

python ranked_training.py RUNS: a JSON list; of each run its ranks and its `TrainConfig` settings.
Runs follow one another, so that one may go on with another's folder.
"""

import gc
import itertools
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from support.processes import free_ports
from support.simulated_clocks import SharedClock
from support.training import make_config

from tokenfeed import Batch, ShardLoader
from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.trainer.loop.loaders import SplitLoaders
from tokenfeed.trainer.loop.run import train as run_until
from tokenfeed.trainer.tasks import vocabulary_loss

TIMEOUT_S = 600
BEGINS = "-- the next run --\n"
"""Printed to stderr before each run."""
_WORTH_BYTES = vocabulary_loss.WORTH_BYTES


def train(settings: dict[str, Any], rank: int = 0) -> None:
    """Train; what `ends` says happens on one rank after one step, and the rank that `late` says
    has a loader that sleeps, by `clock`."""
    shards, run_dir = settings.pop("shards"), Path(settings.pop("run_dir"))
    if "init_from" in settings:
        settings["init_from"] = Path(settings["init_from"])
    how, ending, last = settings.pop("ends", ("stop", 0, -1))
    vocabulary_loss.WORTH_BYTES = 0 if settings.pop("in_chunks", False) else _WORTH_BYTES
    steps, stops = itertools.count(1), False

    def end_step() -> bool:
        nonlocal stops
        if next(steps) != last or rank != ending:
            return False
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        stops = True
        return False

    (late, seconds), clock = settings.pop("late", (-1, 0.0)), settings.pop("clock", None)
    if clock:
        clock.join(rank)
    if rank == late:
        make_late(lambda: clock.sleep(seconds))
    run_until(make_config(shards, run_dir, **settings), lambda: stops, end_step)


def make_late(sleep: Callable[[], object]) -> None:
    """Have this process sleep before each micro-batch."""
    train_loader = SplitLoaders.train_loader

    class LateLoader(ShardLoader):
        def __iter__(self) -> Iterator[Batch]:
            for batch in super().__iter__():
                sleep()
                yield batch

    def late(loaders: SplitLoaders) -> ShardLoader:
        loader = train_loader(loaders)
        loader.__class__ = LateLoader
        return loader

    SplitLoaders.train_loader = late  # type: ignore[method-assign]


def in_a_fork(rank: int, size: int, port: int, settings: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    signal.alarm(TIMEOUT_S)
    if size > 1:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in own.items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    code = 1
    try:
        train(dict(settings), rank)
        code = 0
    except TokenfeedError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main(runs: list[tuple[int, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)  # no threads, which forks would lack
    ended = []
    with tempfile.TemporaryDirectory() as folder:  # each fork would import anew what comes late
        train(runs[0][1] | {"run_dir": folder + "/run", "steps": 1})
    gc.collect()
    gc.freeze()  # else collections of each fork would look at, and copy, all that was imported
    for size, settings in runs:
        print(BEGINS, end="", file=sys.stderr, flush=True)
        [port] = free_ports()
        if "late" in settings:
            settings["clock"] = SharedClock()
        ranks = [in_a_fork(rank, size, port, settings) for rank in range(size)]
        ended.append([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks])
    print(json.dumps(ended))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
