"""Whatever kills a training, also while it saves, it goes on to what it would have become."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from places import SUPPORT
from training import write_counting

KILLS = 40


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    seen = killed_training(tmp_path, write_dataset)
    assert seen["during_saves"] > KILLS // 4


@pytest.mark.slow
def test_a_run_that_is_killed_and_loses_its_disk_goes_on_from_its_upload(
    tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    seen = killed_training(tmp_path, write_dataset, "--lose-disks")
    assert seen["during_uploads"] > KILLS // 4


def killed_training(
    tmp_path: Path, write_dataset: Callable[..., Path], *options: str
) -> dict[str, int]:
    shards = write_counting(write_dataset, tmp_path / "shards", rows=400, validation_rows=20)
    program = [sys.executable, str(SUPPORT / "killed_training.py")]
    ended = subprocess.run(
        [*program, str(shards), str(tmp_path), str(KILLS), *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    seen: dict[str, int] = json.loads(ended.stdout)
    assert seen["kills"] == KILLS
    assert seen["runs"] > 2
    return seen
