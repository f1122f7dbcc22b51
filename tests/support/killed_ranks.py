"""Trains on two ranks, of which one or both are killed at a random time, again and again, and
prints what was seen as a line of JSON.

python killed_ranks.py SHARDS FOLDER KILLS

The disk is slow, so that many kills come while a checkpoint is written.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from killed_training import STEPS, slow_down
from ranked_training import free_port, in_a_fork, train
from saves import names_in
from training import load_weights, read_metrics

from tokenfeed.trainer.checkpoints import format as checkpoint_format
from tokenfeed.trainer.checkpoints.folder import Checkpoints

_LONGEST_S, _END_S = 2.0, 20


def settings_of(shards: Path, run_dir: Path) -> dict[str, Any]:
    resume = Checkpoints.of_run(run_dir).latest() is not None
    every = {"save_every": 2, "eval_every": 4, "eval_batches": 2}
    return {"shards": shards, "run_dir": run_dir, "steps": STEPS, "resume": resume} | every


def session(settings: dict[str, Any], draw: random.Random) -> bool:
    """Whether the ranks have ended by themselves, with all steps."""
    port = free_port()
    ranks = [in_a_fork(rank, 2, port, settings) for rank in range(2)]
    victims = draw.choice([ranks[:1], ranks[1:], ranks])
    time.sleep(draw.uniform(0.1, _LONGEST_S))
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    assert time.monotonic() - killed < _END_S, "a rank was left behind"
    return codes == [0, 0]


def compare(run_dir: Path, undisturbed: Path) -> None:
    losses, others = (read_metrics(folder, "loss") for folder in (run_dir, undisturbed))
    assert losses.keys() == others.keys()
    assert max(abs(losses[step] - others[step]) for step in losses) < 1e-5
    weights, whole = load_weights(run_dir, STEPS), load_weights(undisturbed, STEPS)
    assert all((weights[name] - whole[name]).abs().max() < 1e-5 for name in weights)
    assert {*names_in(run_dir / "checkpoints")} >= {*names_in(undisturbed / "checkpoints")}


def main(shards: Path, folder: Path, kills: int) -> None:
    torch.set_num_threads(1)  # no threads, which forks would lack
    draw, undisturbed = random.Random(0), folder / "undisturbed"
    train(settings_of(shards, undisturbed))
    slow_down(checkpoint_format)
    seen = {"kills": 0, "during_saves": 0, "runs": 0}
    while seen["kills"] < kills:
        run_dir = folder / str(seen["runs"])
        ended = session(settings_of(shards, run_dir), draw)
        seen["kills"] += not ended
        seen["during_saves"] += bool(list(run_dir.glob("checkpoints/*.tmp")))
        latest = Checkpoints.of_run(run_dir).latest()
        if latest == Checkpoints.of_run(run_dir).path(STEPS) and (run_dir / "report.json").exists():
            compare(run_dir, undisturbed)
            seen["runs"] += 1
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
