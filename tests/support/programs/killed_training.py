"""Trains in forks that are killed, again and again, and prints what was seen as a line of JSON.

python killed_training.py SHARDS FOLDER KILLS

Half of the kills come at a random time, half when the thread that saves opens, makes, renames or
deletes its n-th file or folder. The disk is slow, so that many come while a checkpoint is written.
"""

import gc
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.hf_storage  # else each fork that resumes imports it
from support.checkpoints import assert_same, names_in
from support.training import assert_same_run, load_state, make_config, run

from tokenfeed.trainer.checkpoints import async_saver
from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints
from tokenfeed.trainer.models.transformer import SIZES, ModelSize

STEPS = 16
_LONGEST_S, _MOST_EVENTS = 0.5, 60


def train(shards: Path, run_dir: Path) -> None:
    """A whole run, or its rest."""
    settings = {"steps": STEPS, "save_every": 2, "eval_every": 4, "eval_tokens": 256}
    run(make_config(shards, run_dir, **settings, resume="auto"))


def slow_down(module: Any) -> None:
    write = module.write_tensors

    def slow(*args: Any) -> Any:
        checksum = write(*args)
        time.sleep(0.02)
        return checksum

    module.write_tensors = slow


def kill_at(last_event: int) -> None:
    events = itertools.count(1)

    def hook(event: str, args: Any) -> None:
        is_of_files = event == "open" or event.startswith(("os.", "shutil."))
        if (
            is_of_files
            and threading.current_thread().name == "checkpoint"
            and next(events) == last_event
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def in_a_fork(shards: Path, run_dir: Path, last_event: int | None, seconds: float) -> bool:
    """Whether it was killed; else it has finished."""
    child = os.fork()
    if child == 0:
        try:
            if last_event is not None:
                kill_at(last_event)
            train(shards, run_dir)
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.002)
    else:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL), "it ended with an error"
    return os.WIFSIGNALED(status)


def compare(run_dir: Path, undisturbed: Path) -> None:
    """Metrics, all that the last checkpoints hold, and which was best are the same."""
    assert_same_run(run_dir, undisturbed, STEPS)
    for step in (STEPS, STEPS - 2):
        assert_same(load_state(run_dir, step), load_state(undisturbed, step))
    best = [Checkpoints.of_run(folder).best() for folder in (run_dir, undisturbed)]
    assert best[0] == best[1], best
    assert {*names_in(run_dir / "checkpoints")} >= {*names_in(undisturbed / "checkpoints")}


def main(shards: Path, folder: Path, kills: int) -> None:
    draw, undisturbed = random.Random(0), folder / "undisturbed"
    torch.set_num_threads(1)  # no threads, which forks would lack
    SIZES["tiny"] = ModelSize(layers=1, width=32, heads=2)
    train(shards, undisturbed)  # not in a fork: each would import anew what is imported late
    slow_down(async_saver)
    gc.freeze()  # else collections of each fork would look at, and copy, all that was imported
    seen = {"kills": 0, "during_saves": 0, "runs": 0}
    while seen["kills"] < kills or not seen["runs"]:
        run_dir = folder / str(seen["runs"])
        at_event = draw.random() < 0.5
        last_event = draw.randint(1, _MOST_EVENTS) if at_event else None
        if in_a_fork(shards, run_dir, last_event, 60 if at_event else draw.uniform(0, _LONGEST_S)):
            seen["kills"] += 1
            seen["during_saves"] += bool(list(run_dir.glob("checkpoints/*.tmp")))
        else:
            compare(run_dir, undisturbed)
            seen["runs"] += 1
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
