"""The loop makes the host wait for a GPU in no step."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from support.host_waits import HostWaits
from support.training import RUNS, follow_brackets, make_config

from tokenfeed.trainer.loop.trainer import Trainer
from tokenfeed.trainer.models.gpt import SIZES, ModelSize


def trained(
    every_task: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, shards: str, **settings: Any
) -> HostWaits:
    """The waits of a whole run."""
    config = make_config(every_task / shards, folder / "run", steps=4, log_every=3, **settings)
    monkeypatch.setitem(SIZES, "tiny", ModelSize(layers=1, width=64, heads=2))
    trainer = Trainer(config)
    with HostWaits(follow_brackets(monkeypatch)) as waits:
        trainer.train(lambda: False)
    trainer.close()
    return waits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "optimizer"),
    [
        *((run, "adamw") for run in RUNS if not run.startswith(("complete", "lm"))),
        ("lm packed", "muon"),
    ],
)
def test_steps_and_saves_of_every_task_wait_for_nothing_and_log_lines_and_evaluations_do(
    every_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, optimizer: str
) -> None:
    waits = trained(every_task, tmp_path, monkeypatch, **RUNS[run], optimizer=optimizer)
    assert [str(wait) for wait in waits.seen if wait.cause in (None, "data")] == []
    assert {wait.cause for wait in waits.seen} == {"log", "evaluation"}


def test_fp16_waits_as_often_as_fp32(
    every_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(precision: str) -> list[tuple[str, str | None]]:
        folder, own = tmp_path / precision, RUNS["lm packed"] | {"precision": precision}
        seen = trained(every_task, folder, monkeypatch, **own).seen
        return [(str(wait), wait.cause) for wait in seen]

    assert waits("fp16") == waits("fp32")


def test_a_wait_planted_in_a_step_is_found_and_located(
    every_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = torch.nn.LayerNorm.forward

    def planted(module: torch.nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        x.mean().item()
        return forward(module, x)

    monkeypatch.setattr(torch.nn.LayerNorm, "forward", planted)
    waits = trained(every_task, tmp_path, monkeypatch, **RUNS["lm packed"])
    line = inspect.getsourcelines(planted)[1] + 1
    assert {(w.file, w.line) for w in waits.seen if w.cause is None} == {(__file__, line)}
