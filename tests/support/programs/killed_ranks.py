"""Trains on ranks that are killed at random times, one or all of them, again and again, and prints
what was seen as a line of JSON.

python killed_ranks.py SHARDS FOLDER KILLS

Runs of two kinds take turns. On two ranks, in fp32: they end with the bits of an undisturbed run on
two. In double precision, each time on 1, 2 or 3 ranks: they end with the weights of an undisturbed
run on one. The disk is slow, so that many kills come while a checkpoint is written.

A kill comes a random number of steps after all ranks have joined their group, and up to 0.1 s
later. Before they join, the other ranks would wait for minutes for the dead one, until their
launcher ends them, and here is no launcher. After a number of seconds, a slow machine would end no
run at all.
"""

import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.hf_storage  # else each fork that resumes imports it
from support.checkpoints import names_in
from support.processes import free_ports
from support.programs.killed_training import STEPS, slow_down
from support.programs.ranked_training import TIMEOUT_S, in_a_fork, train
from support.training import assert_same_run, load_weights, read_metrics

from tokenfeed.trainer.checkpoints import async_saver
from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints
from tokenfeed.trainer.distributed import parallel  # noqa: F401  (else each fork imports it)
from tokenfeed.trainer.distributed.world import StepSync, World
from tokenfeed.trainer.loop import run as loop_run
from tokenfeed.trainer.report.run_files import Report

_MOST_STEPS, _LATEST_S, _PAUSE_S, _END_S = 10, 0.1, 5.0, 100
_NOTED = os.pipe()
_SETTINGS = {
    "steps": STEPS,
    "micro_batch_tokens": 64,
    "step_tokens": 256,  # four micro-batches: three ranks need fillers
    "save_every": 2,
    "eval_every": 4,
    "eval_tokens": 256,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """What is trained, and on how many ranks."""

    model: str
    sizes: tuple[int, ...]
    undisturbed: int


KINDS = {
    "same": Kind("support.training:small_model", (2,), 2),
    "changing": Kind("support.training:double_model", (1, 2, 3), 1),
}


def settings_of(kind: Kind, shards: Path, run_dir: Path) -> dict[str, Any]:
    resume = Checkpoints.of_run(run_dir).latest() is not None
    return _SETTINGS | {
        "shards": shards,
        "run_dir": run_dir,
        "model": kind.model,
        "resume": resume,
    }


def started(settings: dict[str, Any], size: int) -> list[int]:
    """The processes of the ranks, which have joined their group."""
    [port] = free_ports()
    while wait_for(1, 0.0):
        pass  # what the ranks before have written
    ranks = [in_a_fork(rank, size, port, settings) for rank in range(size)]
    assert wait_for(size, TIMEOUT_S), "the ranks did not join"
    return ranks


def wait_for(count: int, longest_s: float) -> bool:
    """Wait until ranks have noted so many events. Whether they have, with no pause too long."""
    while count and select.select([_NOTED[0]], [], [], longest_s)[0]:
        count -= len(os.read(_NOTED[0], count))
    return not count


def note_events() -> None:
    """Let each rank write a byte when it has joined its group, and after each step."""
    join, after_step = loop_run.join_world, StepSync.after_step

    def noted_join(device: str) -> World:
        world = join(device)
        os.write(_NOTED[1], b".")
        return world

    def noted_step(sync: StepSync, **counts: Any) -> tuple[int, int]:
        os.write(_NOTED[1], b".")
        return after_step(sync, **counts)

    loop_run.join_world, StepSync.after_step = noted_join, noted_step  # type: ignore[method-assign]


def codes_of(ranks: Sequence[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]


def session(settings: dict[str, Any], size: int, draw: random.Random) -> bool:
    """Whether the ranks have ended by themselves, with all steps."""
    ranks = started(settings, size)
    victims = draw.choice([[draw.choice(ranks)], ranks])
    wait_for(size * draw.randint(0, _MOST_STEPS), _PAUSE_S)
    time.sleep(draw.uniform(0, _LATEST_S))
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    codes = codes_of(ranks)
    assert time.monotonic() - killed < _END_S, "a rank was left behind"
    return not any(codes)


def compare(name: str, run_dir: Path, undisturbed: Path) -> None:
    if name == "same":
        assert_same_run(run_dir, undisturbed, STEPS)
    else:
        losses, others = (read_metrics(folder, "loss") for folder in (run_dir, undisturbed))
        assert losses.keys() == others.keys()
        assert max(abs(losses[step] - others[step]) for step in losses) < 1e-6
        weights, whole = load_weights(run_dir, STEPS), load_weights(undisturbed, STEPS)
        assert all((weights[key] - whole[key]).abs().max() < 1e-9 for key in weights)
    assert {*names_in(run_dir / "checkpoints")} >= {*names_in(undisturbed / "checkpoints")}


def is_done(run_dir: Path) -> bool:
    report = Report.of_run(run_dir)
    return report is not None and report.finished


def main(shards: Path, folder: Path, kills: int) -> None:
    torch.set_num_threads(1)  # no threads, which forks would lack
    draw = random.Random(0)
    train(_SETTINGS | {"shards": shards, "run_dir": folder / "imports", "steps": 1})
    note_events()
    for name, kind in KINDS.items():
        settings = settings_of(kind, shards, folder / name / "undisturbed")
        assert not any(codes_of(started(settings, kind.undisturbed)))
    slow_down(async_saver, _LATEST_S)  # else no kill of a loaded machine may hit a save
    seen = {"kills": 0, "during_saves": 0, "same": 0, "changing": 0}
    while seen["kills"] < kills:
        name = min(KINDS, key=seen.__getitem__)
        kind, run_dir = KINDS[name], folder / name / str(seen[name])
        ended = session(settings_of(kind, shards, run_dir), draw.choice(kind.sizes), draw)
        seen["kills"] += not ended
        seen["during_saves"] += bool(list(run_dir.glob("checkpoints/*.tmp")))
        if is_done(run_dir):
            compare(name, run_dir, folder / name / "undisturbed")
            seen[name] += 1
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
