"""What makes the host wait for a GPU is found with its line, and the loop does it in no step."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.host_waits import HostWaits
from support.training import RUNS, follow_brackets, make_config

from tokenfeed.trainer.loop.trainer import Trainer
from tokenfeed.trainer.models.transformer import SIZES, ModelSize

VALUES = torch.arange(6)
MASK = VALUES > 2

WAITING: dict[str, Callable[[], Any]] = {
    "item": lambda: VALUES[0].item(),
    "float": lambda: float(VALUES.sum()),
    "bool": lambda: bool(MASK.all()),
    "index": lambda: [1, 2, 3][VALUES[0]],
    "tolist": lambda: VALUES.tolist(),
    "cpu": lambda: VALUES.cpu(),
    "equal": lambda: torch.equal(VALUES, VALUES),
    "allclose": lambda: torch.allclose(VALUES.float(), VALUES.float()),
    "mask": lambda: VALUES[MASK],
    "mask of a list": lambda: VALUES.view(2, 3)[:, torch.tensor([True, False, True])],
    "put by mask": lambda: VALUES.clone().__setitem__(MASK, torch.zeros(3, dtype=torch.int64)),
    "nonzero": lambda: MASK.nonzero(),
    "where": lambda: torch.where(MASK),
    "masked_select": lambda: VALUES.masked_select(MASK),
    "unique": lambda: VALUES.unique(),
    "unique_consecutive": lambda: VALUES.unique_consecutive(),
    "bincount": lambda: VALUES.bincount(),
    "repeat_interleave": lambda: VALUES.repeat_interleave(VALUES),
    "multinomial": lambda: torch.ones(4).multinomial(2),
}

HARMLESS: dict[str, Callable[[], Any]] = {
    "where": lambda: torch.where(MASK, VALUES, 0),
    "index": lambda: VALUES[VALUES.flip(0)],
    "fill by mask": lambda: VALUES.clone().__setitem__(MASK, 0),
    "masked_fill": lambda: VALUES.masked_fill(MASK, 0),
    "repeat_interleave": lambda: VALUES.repeat_interleave(VALUES, output_size=15),
    "cumsum": lambda: VALUES.cumsum(0)[-1:],
    "to": lambda: VALUES.to("cpu", torch.int32, non_blocking=True),
    "norm": lambda: torch.nn.utils.get_total_norm([VALUES.float()]).isfinite(),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_found_with_its_line(name: str) -> None:
    function = WAITING[name]
    with HostWaits() as waits:
        function()
    assert waits.seen
    first_line = function.__code__.co_firstlineno
    assert {(wait.file, wait.line) for wait in waits.seen} == {(__file__, first_line)}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_wait_is_not_found(name: str) -> None:
    with HostWaits() as waits:
        HARMLESS[name]()
    assert waits.seen == []


def test_a_wait_in_a_backward_pass_is_found() -> None:
    parameter = torch.ones(3, requires_grad=True)
    parameter.register_hook(lambda gradient: gradient * gradient.sum().item())
    with HostWaits() as waits:
        parameter.sum().backward()
    assert [wait.operator for wait in waits.seen] == ["_local_scalar_dense"]


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


def test_steps_under_autocast_wait_for_nothing(
    every_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = trained(every_task, tmp_path, monkeypatch, **RUNS["complete packed"], precision="bf16")
    assert [str(wait) for wait in waits.seen if wait.cause in (None, "data")] == []


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
