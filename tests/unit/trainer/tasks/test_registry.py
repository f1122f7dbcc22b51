"""What others may add to the trainer is added in few places: a task, and a device for ranks."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.simulated_cuda import simulate
from support.training import make_config, parsed, read_metrics, run, write_labelled

from tokenfeed.pipeline.format import schema
from tokenfeed.pipeline.format.schema import Column, Task
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.distributed import world as group
from tokenfeed.trainer.tasks.label_tasks import Score
from tokenfeed.trainer.tasks.registry import TASKS
from tokenfeed.trainer.tasks.task import BestBy

GRADE: Any = "grade"


def add_grades(monkeypatch: pytest.MonkeyPatch, per: str) -> None:
    """What the format is told of a task whose rows, or tokens, have a number."""
    column = Column(name="grade", dtype="float32", per=per)  # type: ignore[arg-type]
    monkeypatch.setitem(schema.OF_TASK, GRADE, (column,))
    monkeypatch.setitem(schema.ROLES, "grade", "target")


@pytest.mark.parametrize(("per", "like"), [("row", "score"), ("token", "tag")])
def test_a_task_gets_the_defaults_that_suit_its_column(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, per: str, like: Task
) -> None:
    add_grades(monkeypatch, per)
    found = parsed("--run-dir", "run", "--shards", write_labelled(tmp_path / "ours", GRADE))
    assert found.model != TrainConfig(shards="", run_dir=tmp_path).model
    theirs = parsed("--run-dir", "run", "--shards", write_labelled(tmp_path / "theirs", like))
    assert found == dataclasses.replace(theirs, shards=found.shards)


class Grade(Score):
    """The grade of a row, judged by its error."""

    name = GRADE
    best_by = BestBy("rmse", less_is_better=True)


def test_the_best_checkpoint_of_a_task_judged_by_an_error_has_the_least(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add_grades(monkeypatch, "row")
    monkeypatch.setitem(TASKS, GRADE, Grade)
    shards = write_labelled(tmp_path / "grade", GRADE)
    config = make_config(shards, tmp_path / "run", steps=12, save_every=2, eval_every=2, keep=9)
    report = run(config)
    errors = read_metrics(tmp_path / "run", "validation_rmse")
    del errors[0]
    assert errors[report.best_step or 0] == min(errors.values()) < max(errors.values())


def test_each_rank_has_a_device_of_its_own_and_the_backend_of_its_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}
    current: list[torch.device] = []
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(group, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 1, 2)]))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **more: asked.update(more, backend=backend)
    )
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    with simulate(monkeypatch):
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
        world = group.join_world("cuda")
    assert [world.device] == current == [torch.device("cuda:1")] == [asked["device_id"]]
    assert asked["backend"] == "cpu:gloo,cuda:nccl"
