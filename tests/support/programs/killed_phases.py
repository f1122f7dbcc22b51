"""Trains a run with phases in forks that are killed in each phase and at each border between two,
and prints what was seen as a line of JSON.

python killed_phases.py CONFIG FOLDER

The phases of CONFIG have four steps, saved every two steps. Each fork goes on in the same folder,
and is killed when it is about to give a file or folder the next name in `points`.
"""

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import peft  # noqa: F401 - else each fork imports it
import torch
import torch.distributed.checkpoint.hf_storage  # likewise
from support.checkpoints import assert_same
from support.training import assert_same_run, load_state

from tokenfeed.tools import train
from tokenfeed.trainer.config.run_config import phase_folders

STEPS = 4
_OF_A_PHASE = (
    "checkpoints/step-00000002",
    "checkpoints/step-00000004",
    "report.html",  # all is trained, and the report is written
    "",  # the border: the page of the whole run is next
)
REPORTED = (
    *("finished", "steps", "skipped_steps", "tokens", "padding", "metrics", "best_step", "notes"),
    *("loss_first", "loss_last", "validation_loss_first", "validation_loss_last"),
    *("model", "parameters", "trained_parameters", "precision"),
)
"""What a report says about training. The rest is about time."""


def points(folders: list[Path]) -> list[Path]:
    """Names that files and folders get, in the order of the kills."""
    found = [folder / name for folder in folders for name in _OF_A_PHASE]
    return [folders[0].parent / "report.html" if path in folders else path for path in found]


def kill_before(path: Path) -> None:
    def hook(event: str, args: Any) -> None:
        if event == "os.rename" and Path(os.fsdecode(args[1])) == path:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def run(config: Path, run_dir: Path) -> None:
    sys.argv = ["train", "--config", str(config), "--run-dir", str(run_dir)]
    try:
        train.main()
    except SystemExit as ended:
        assert not ended.code, ended.code


def was_killed(config: Path, run_dir: Path, point: Path | None) -> bool:
    child = os.fork()
    if child == 0:
        try:
            if point is not None:
                kill_before(point)
            run(config, run_dir)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), "it ended with an error"
    return code != 0


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_bytes())
    return {name: report[name] for name in REPORTED}


def main(config: Path, folder: Path) -> None:
    torch.set_num_threads(1)  # no threads, which forks would lack
    whole, killed = folder / "whole", folder / "killed"
    run(config, whole)
    gc.freeze()
    folders = [killed / each.name for each in phase_folders(whole)]
    kills = sum(was_killed(config, killed, point) for point in points(folders))
    assert not was_killed(config, killed, None)
    for each in folders:
        other = whole / each.name
        assert_same_run(each, other, STEPS)
        assert_same(load_state(each, STEPS), load_state(other, STEPS))
        assert report_of(each) == report_of(other)
        assert (each / "report.html").is_file()
    reports = [json.loads((each / "report.json").read_bytes()) for each in (killed, whole)]
    assert all(report["finished"] for report in reports)
    print(json.dumps({"kills": kills, "steps": [report["steps"] for report in reports]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
