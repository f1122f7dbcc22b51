"""What others may add to the trainer is added in few places: here a task."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from training import write_labelled

from tokenfeed.pipeline.format import schema
from tokenfeed.pipeline.format.schema import Column, Task
from tokenfeed.tools.train_command import parse_config
from tokenfeed.trainer.config import TrainConfig

GRADE: Any = "grade"


def add_grades(monkeypatch: pytest.MonkeyPatch, per: str) -> None:
    """What the format is told of a task whose rows, or tokens, have a number."""
    column = Column(name="grade", dtype="float32", per=per)  # type: ignore[arg-type]
    monkeypatch.setitem(schema._OF_TASK, GRADE, (column,))
    monkeypatch.setitem(schema._ROLES, "grade", "target")


@pytest.mark.parametrize(("per", "like"), [("row", "score"), ("token", "tag")])
def test_a_task_gets_the_defaults_that_suit_its_column(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, per: str, like: Task
) -> None:
    add_grades(monkeypatch, per)
    found = settings_for(monkeypatch, write_labelled(tmp_path / "ours", GRADE))
    assert found.model != TrainConfig(shards="", run_dir=tmp_path).model
    theirs = settings_for(monkeypatch, write_labelled(tmp_path / "theirs", like))
    assert found == dataclasses.replace(theirs, shards=found.shards)


def settings_for(monkeypatch: pytest.MonkeyPatch, shards: Path) -> TrainConfig:
    """Those of `train` where the command line names nothing but the data set."""
    monkeypatch.setattr(sys, "argv", ["train", "--shards", str(shards), "--run-dir", "run"])
    return parse_config()
