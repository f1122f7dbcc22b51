"""A step as CUDA graphs computes what it computes without: with graphs that a CPU records."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded_graphs import Graphs
from support.training import go_on_from, make_config, read_metrics, run, write_labelled
from torch import Tensor, nn

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer import step as training_step
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.loop.loaders import SplitLoaders
from tokenfeed.trainer.optim.optimizer import set_learning_rate
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.report.progress_lines import ProgressLog
from tokenfeed.trainer.tasks.registry import task_of
from tokenfeed.trainer.tasks.task import Loss

CASES: dict[str, dict[str, Any]] = {
    "one micro-batch a step": {"step_tokens": 128, "clip_norm": 0.01},
    "micro-batches that are added": {"dropout": 0.2},
    "fp16": {"precision": "fp16", "learning_rate": 0.1},
    "muon in bf16": {"precision": "bf16", "optimizer": "muon"},
    "a part of the weights": {"trainable": "blocks.*.feed*"},
}
STEPS = 8
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("graphs") / "shards", "lm", count=60)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Graphs on this CPU, without the compiler, for steps that a GPU would run as graphs."""
    learners: list[Learner] = []

    def is_one(learner: Learner, micro_batches: list[MicroBatch]) -> bool:
        learners[:] = [learner]
        return len(micro_batches) == 1 and micro_batches[0].is_plain

    def rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
        """A number in fp32 without graphs, too."""
        set_learning_rate(optimizer, torch.tensor(rate).item())

    def held() -> Iterator[Tensor]:
        weights = learners[0].model.parameters()
        return (weight.grad for weight in weights if weight.grad is not None)

    monkeypatch.setattr(Learner, "_has_one_step", is_one)
    monkeypatch.setattr(training_step, "set_learning_rate", rates)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return Graphs(monkeypatch, held)


def settings(shards: Path, run_dir: Path, **changes: Any) -> TrainConfig:
    own = {
        "model": "support.training:one_layer_model",
        "steps": STEPS,
        "eval_every": 100,
        "save_every": 4,
    }
    return make_config(shards, run_dir, **own | {"batching": "packed"} | changes)


def figures(folder: Path) -> list[dict[int, float]]:
    return [read_metrics(folder, name) for name in ("loss", "grad_norm", "skipped_steps")]


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_step_without_graphs(
    shards: Path, tmp_path: Path, graphs: Graphs, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    run(settings(shards, tmp_path / "plain", compile=True, **CASES[case]))
    assert not graphs.all
    norms, add = list[Tensor](), ProgressLog.add

    def keep(log: ProgressLog, step: int, tally: training_step.Tally, norm: Tensor) -> None:
        norms.append(norm)
        add(log, step, tally, norm)

    monkeypatch.setattr(ProgressLog, "add", keep)
    run(settings(shards, tmp_path / "graphs", compile="reduce-overhead", **CASES[case]))
    assert len(set(map(float, norms))) == STEPS  # no later step has overwritten one
    assert figures(tmp_path / "graphs") == figures(tmp_path / "plain")
    assert len(graphs.all) == (2 if case == "one micro-batch a step" else 3)
    assert graphs.replays[0] == graphs.replays[-1] == STEPS - 1


def test_a_run_that_resumes_repeats_the_losses(
    shards: Path, tmp_path: Path, graphs: Graphs
) -> None:
    config = settings(shards, tmp_path / "whole", compile="max-autotune", dropout=0.2)
    run(config)
    go_on_from(tmp_path / "whole", 4, dataclasses.replace(config, run_dir=tmp_path / "rest"))
    assert figures(tmp_path / "rest") == figures(tmp_path / "whole")
    assert graphs.replays[-1] == STEPS - 4 - 1


def test_a_graph_that_computes_something_else_is_an_error(
    shards: Path, tmp_path: Path, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it replays the temperature of its capture, and the step before has another."""
    plain, numbers = training_step.add_gradients, itertools.count(1)

    def cooled(*given: Any, **named: Any) -> Loss:
        loss = plain(*given, **named)
        return Loss(loss.sum * next(numbers), loss.targets)

    monkeypatch.setattr(training_step, "add_gradients", cooled)
    config = settings(shards, tmp_path, compile="reduce-overhead")
    with pytest.raises(ConfigError, match=r"as loss and norm, and not .* Take --compile without"):
        run(config)


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (None, r"CUDA graph: .* not permitted .* Take --compile without"),
        ("CUDA out of memory", r"needs more memory than there is. Start again"),
    ],
)
def test_a_step_that_cannot_be_captured_is_an_error(
    shards: Path,
    tmp_path: Path,
    graphs: Graphs,
    monkeypatch: pytest.MonkeyPatch,
    reason: str | None,
    shown: str,
) -> None:
    plain, calls = training_step.add_gradients, itertools.count()

    def failing(*given: Any, **named: Any) -> Loss:
        loss = plain(*given, **named)
        if reason and next(calls) > 2:
            raise torch.OutOfMemoryError(reason)
        if not reason:
            loss.sum.item()
        return loss

    monkeypatch.setattr(training_step, "add_gradients", failing)
    config = settings(shards, tmp_path, compile="reduce-overhead")
    with pytest.raises(ConfigError, match=shown):
        run(config)


@pytest.mark.parametrize(
    ("changes", "is_whole"),
    [
        ({}, True),
        ({"attention": "documents"}, False),
        ({"batching": "padded"}, False),
        ({"recompute": True}, False),
        ({"model": "support.training:small_model"}, False),
        ({"device": "cpu"}, False),
        ({"compile": True}, False),
    ],
)
def test_a_step_is_graphs_where_all_micro_batches_are_alike(
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    is_whole: bool,
) -> None:
    """Otherwise the parts of the model are, by the mode of the compiler."""
    changes = {"model": "tiny", "device": "cuda", "compile": "reduce-overhead"} | changes
    on_cuda, mode = changes.pop("device") == "cuda", changes["compile"]
    config = settings(shards, tmp_path, **changes)
    task = task_of(config, CPU)
    learner = Learner(config, task, World(CPU))
    learner.rehearse = lambda *_: None  # type: ignore[method-assign, assignment]
    if on_cuda:
        learner.device = torch.device("cuda")
    modes = set[str | None]()
    monkeypatch.setattr(nn.Module, "compile", lambda module, mode, **_: modes.add(mode))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    learner.compile(*SplitLoaders(config, task, CPU).blanks())
    assert learner.runs_as_graphs == is_whole
    assert modes == {None if is_whole or mode is True else mode}
    assert learner.task.has_graphs == (mode is not True and not is_whole)
