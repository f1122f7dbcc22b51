"""Trains in forks that are killed, again and again, and prints what was seen as a line of JSON.

python killed_training.py SHARDS FOLDER KILLS [ADDRESS]

Half of the kills come at a random time, half when the thread that saves opens, makes, renames or
deletes its n-th file or folder. The disk is slow, so that many come while a checkpoint is written.

With an address, runs are uploaded below it, the kills by number come in the thread that uploads, at
its files and requests, and half of the runs go on without their folder. After each kill, all
checkpoints at the address are verified.
"""

import functools
import gc
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.hf_storage  # else each fork that resumes imports it
from support.checkpoints import assert_same, names_in
from support.training import assert_same_run, load_state, make_config, run

from tokenfeed.pipeline.remote import client
from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.trainer.checkpoints import async_saver
from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints
from tokenfeed.trainer.loop.uploads import RunCopy
from tokenfeed.trainer.models.gpt import SIZES, ModelSize

STEPS = 16
_LONGEST_S, _MOST_EVENTS = 0.5, 60


def train(shards: Path, run_dir: Path, address: str | None = None) -> None:
    """A whole run, or its rest."""
    settings = {"steps": STEPS, "save_every": 2, "eval_every": 4, "eval_tokens": 256}
    run(make_config(shards, run_dir, **settings, resume="auto", upload=address))


def verify(address: str) -> None:
    """All checkpoints of a copy are complete."""
    copy = RunCopy(address)
    for step in copy.steps():
        with tempfile.TemporaryDirectory() as folder:
            assert copy.get(step, Path(folder)).meta.step == step


def slow_down(module: Any, seconds: float = 0.02) -> None:
    write = module.write_tensors

    def slow(*args: Any) -> Any:
        checksum = write(*args)
        time.sleep(seconds)
        return checksum

    module.write_tensors = slow


def kill_at(last_event: int, thread: str) -> None:
    events = itertools.count(1)

    def die_at_last() -> None:
        if threading.current_thread().name == thread and next(events) == last_event:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(request: Any) -> Any:
        def send(*args: Any) -> Any:
            die_at_last()
            answer = request(*args)
            die_at_last()
            return answer

        return send

    for name in ("read", "has", "write", "delete", "names"):
        setattr(ObjectStore, name, counted(getattr(ObjectStore, name)))

    def hook(event: str, args: Any) -> None:
        if event == "open" or event.startswith(("os.", "shutil.")):
            die_at_last()

    sys.addaudithook(hook)


def in_a_fork(do: Callable[[], None], seconds: float = 60.0) -> bool:
    """Whether it was killed; else it has finished."""
    child = os.fork()
    if child == 0:
        try:
            do()
            os._exit(0)
        except Exception:
            traceback.print_exc()
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


def compare(run_dir: Path, undisturbed: Path, *, is_downloaded: bool) -> None:
    """Metrics, all that the last checkpoints hold, and which was best are the same. A checkpoint
    before the newest is not downloaded."""
    assert_same_run(run_dir, undisturbed, STEPS)
    for step in (STEPS,) if is_downloaded else (STEPS, STEPS - 2):
        assert_same(load_state(run_dir, step), load_state(undisturbed, step))
    best = [Checkpoints.of_run(folder).best() for folder in (run_dir, undisturbed)]
    assert best[0] == best[1], best
    if not is_downloaded:
        assert {*names_in(run_dir / "checkpoints")} >= {*names_in(undisturbed / "checkpoints")}


def main(shards: Path, folder: Path, kills: int, address: str = "") -> None:
    client.own_process()
    draw, undisturbed = random.Random(0), folder / "undisturbed"
    torch.set_num_threads(1)  # no threads, which forks would lack
    SIZES["tiny"] = ModelSize(layers=1, width=32, heads=2)
    train(shards, undisturbed)  # not in a fork: each would import anew what is imported late
    slow_down(async_saver)
    gc.freeze()  # else collections of each fork would look at, and copy, all that was imported
    seen = {"kills": 0, "during_saves": 0, "runs": 0}
    while seen["kills"] < kills or not seen["runs"]:
        run_dir, copy = folder / str(seen["runs"]), f"{address}/{seen['runs']}" if address else None
        at_event = draw.random() < 0.5
        last_event = draw.randint(1, _MOST_EVENTS) if at_event else None

        def go_on(
            run_dir: Path = run_dir, copy: str | None = copy, last_event: int | None = last_event
        ) -> None:
            if last_event is not None:
                kill_at(last_event, "upload" if address else "checkpoint")
            train(shards, run_dir, copy)

        was_killed = in_a_fork(go_on, 60 if at_event else draw.uniform(0, _LONGEST_S))
        if was_killed:
            seen["kills"] += 1
            seen["during_saves"] += bool(list(run_dir.glob("checkpoints/*.tmp")))
        if copy and not in_a_fork(functools.partial(verify, copy)) and draw.random() < 0.5:
            shutil.rmtree(run_dir, ignore_errors=True)
            if not was_killed:
                in_a_fork(functools.partial(train, shards, run_dir, copy))
        if not was_killed:
            compare(run_dir, undisturbed, is_downloaded=bool(copy))
            seen["runs"] += 1
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
