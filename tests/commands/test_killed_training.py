"""Whatever kills a training, also while it saves, it goes on to what it would have become."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from places import SUPPORT
from training import write_counting

KILLS, WITH_UPLOADS = 30, 16


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    seen = killed_training(tmp_path, write_dataset, KILLS)
    assert seen["during_saves"] > KILLS // 4


@pytest.mark.long
@pytest.mark.slow
def test_a_run_that_is_killed_and_loses_its_disk_goes_on_from_its_upload(
    tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    seen = killed_training(tmp_path, write_dataset, WITH_UPLOADS, "--lose-disks")
    assert seen["during_uploads"] > 0


def killed_training(
    tmp_path: Path, write_dataset: Callable[..., Path], kills: int, *options: str
) -> dict[str, int]:
    shards = write_counting(write_dataset, tmp_path / "shards", rows=400, validation_rows=20)
    program = [SUPPORT / "killed_training.py", shards, tmp_path, kills, *options]
    ended = warm.run(program, timeout=240)
    assert ended.returncode == 0, ended.stderr
    seen: dict[str, int] = json.loads(ended.stdout)
    assert seen["kills"] == kills
    assert seen["runs"] > 0
    return seen
