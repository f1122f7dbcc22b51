"""Options of `train` do what their help says: said on a command line, seen in the run."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import call

from tokenfeed.tools import train as command
from tokenfeed.trainer import step as training_step
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.loop import run as outside
from tokenfeed.trainer.loop.evaluation import evaluate
from tokenfeed.trainer.loop.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "model": "support.training:small_model",
    "steps": 4,
    "sequence_length": 32,
    "micro_batch_tokens": 128,
    "step_tokens": 256,
    "warmup_steps": 2,
    "eval_every": 4,
    "save_every": 4,
    "log_every": 1,
    "device": "cpu",
}


@dataclass
class Seen:
    """What a run did."""

    folder: Path
    trainer: Trainer = None  # type: ignore[assignment]
    report: dict[str, Any] = field(default_factory=dict)
    batches: list[list[MicroBatch]] = field(default_factory=list)
    """Micro-batches of each step."""
    clipped: set[float] = field(default_factory=set)
    evaluated: int = 0
    initial: torch.Tensor = None  # type: ignore[assignment]

    def told(self, name: str) -> dict[int, float]:
        """A figure of metrics.jsonl, by step."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line[name] for line in lines if name in line}

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        return {tuple(batch.ids_BT.shape) for step in self.batches for batch in step}

    @property
    def saved(self) -> list[int]:
        found = (self.folder / "checkpoints").glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in found)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.trainer.learner.optimizer

    @property
    def plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = self.trainer.loader.state_dict()["plan"]
        return plan

    @property
    def rates(self) -> list[float]:
        return [*self.told("learning_rate").values()]

    def of_adamw(self, name: str) -> set[Any]:
        return {group[name] for group in self.optimizer.param_groups}


@pytest.fixture
def run_of(lm_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Seen]:
    """Runs the command with these settings, and says what was seen."""

    def run(**changes: Any) -> Seen:
        seen = Seen(tmp_path / f"run{len(list(tmp_path.iterdir()))}")
        _watch(seen, monkeypatch)
        settings = {"shards": lm_rows, "run_dir": seen.folder} | SETTINGS | changes
        said = {name: value for name, value in settings.items() if value is not None}
        words = [(f"--{name.replace('_', '-')}", value) for name, value in said.items()]
        seen.report = json.loads(call(command.main, *itertools.chain(*words), "--json").stdout)
        return seen

    return run


def _watch(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(Trainer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            seen.trainer = self
            seen.initial = next(self.learner.model.parameters()).detach().clone()

    begins = True
    plain_add, plain_clip = training_step.add_gradients, training_step.scale_and_clip

    def add_gradients(learner: Any, micro_batch: MicroBatch, *, last: bool, **more: Any) -> Any:
        nonlocal begins
        if begins:
            seen.batches.append([])
        begins = last
        seen.batches[-1].append(micro_batch)
        return plain_add(learner, micro_batch, last=last, **more)

    def scale_and_clip(*arguments: Any) -> Any:
        seen.clipped.add(arguments[-1])
        return plain_clip(*arguments)

    def counted(model: Any, task: Any, batches: Any, *others: Any) -> Any:
        kept = list(batches)
        targets = int(sum(each.targets_B.sum() for each in kept))
        seen.evaluated = min(seen.evaluated or targets, targets)  # the test split has more
        return evaluate(model, task, kept, *others)

    monkeypatch.setattr(outside, "Trainer", Watched)
    monkeypatch.setattr(training_step, "add_gradients", add_gradients)
    monkeypatch.setattr(training_step, "scale_and_clip", scale_and_clip)
    monkeypatch.setattr("tokenfeed.trainer.loop.evaluation.evaluate", counted)


def rows_a_step(seen: Seen) -> set[int]:
    return {sum(len(batch.ids_BT) for batch in step) for step in seen.batches}


def has_dropout(seen: Seen) -> bool:
    seen.trainer.learner.model.train()
    batch = seen.batches[0][0]
    task, model = seen.trainer.task, seen.trainer.learner.model
    return task.loss(model, batch).sum.item() != task.loss(model, batch).sum.item()


Holds = Callable[[Seen], bool]
RUNS: list[dict[str, tuple[Any, Holds]]] = [
    {
        "optimizer": ("muon", lambda seen: "Muon" in type(seen.optimizer).__name__),
        "learning_rate": (0.01, lambda seen: max(seen.told("learning_rate").values()) == 0.01),
        "schedule": ("constant", lambda seen: seen.told("learning_rate")[4] == 0.01),
        "clip_norm": (0.25, lambda seen: seen.clipped == {0.25}),
        "precision": ("bf16", lambda seen: seen.report["precision"] == "bf16"),
        "step_tokens": (512, lambda seen: {len(step) for step in seen.batches} == {4}),
        "attention": ("documents", lambda seen: seen.batches[0][0].scope.cu_seqlens is not None),
        "eval_every": (3, lambda seen: [*seen.told("validation_loss")] == [0, 3, 4]),
        "eval_tokens": (128, lambda seen: 64 < seen.evaluated < 128),
        "save_every": (3, lambda seen: seen.saved == [3, 4]),
        "log_every": (3, lambda seen: [*seen.told("loss")] == [1, 3, 4]),
        "device": ("cpu", lambda seen: seen.report["device"] == "cpu"),
    },
    {
        "steps": (3, lambda seen: seen.report["steps"] == 3 == len(seen.batches)),
        "sequence_length": (64, lambda seen: seen.shapes == {(2, 64)}),
        "schedule": ("linear", lambda seen: seen.told("learning_rate")[3] < 0.001),
        "weight_decay": (0.3, lambda seen: seen.of_adamw("weight_decay") == {0.0, 0.3}),
        "beta1": (0.8, lambda seen: seen.of_adamw("betas") == {(0.8, 0.99)}),
        "beta2": (0.99, lambda seen: seen.of_adamw("betas") == {(0.8, 0.99)}),
        "epsilon": (1e-6, lambda seen: seen.of_adamw("eps") == {1e-6}),
    },
    {
        "model": ("words", lambda seen: seen.report["model"] == "words"),
        "batching": ("padded", lambda seen: len(seen.shapes) > 1),
        "order": ("file", lambda seen: seen.plan["order"] == "file"),
        "warmup_steps": (4, lambda seen: seen.rates == [0.0005, 0.001, 0.0015, 0.002]),
        "shards": ("{lm_rows}", lambda seen: seen.report["vocabulary_size"] == 64),
    },
    {
        "attention": ("rows", lambda seen: seen.batches[0][0].scope.cu_seqlens is None),
        "micro_batch_tokens": (64, lambda seen: seen.shapes == {(2, 32)}),
        "min_learning_rate": (0.001, lambda seen: seen.rates[-1] == 0.001),
        "keep": (2, lambda seen: seen.saved == [3, 4]),
        "save_every": (1, lambda seen: seen.saved == [3, 4]),
        "run_dir": ("{folder}", lambda seen: (seen.folder / "report.json").is_file()),
    },
    {"micro_batch_tokens": ("auto", lambda seen: rows_a_step(seen) == {8})},
]
"""Options that are given together, each with its value and with what a run shows of it."""


@pytest.mark.slow
@pytest.mark.parametrize("together", RUNS, ids=range(len(RUNS)))
def test_an_option_does_what_its_help_says(
    together: dict[str, tuple[Any, Holds]], run_of: Callable[..., Seen]
) -> None:
    given = {name: value for name, (value, _) in together.items()}
    seen = run_of(**{name: each for name, each in given.items() if not str(each).startswith("{")})
    assert [name for name, (_, holds) in together.items() if not holds(seen)] == []


def test_rows_of_a_step_are_those_asked_for(run_of: Callable[..., Seen]) -> None:
    assert rows_a_step(run_of(step_rows=6, step_tokens=None, steps=1)) == {6}


def test_dropout_draws_and_none_does_not(run_of: Callable[..., Seen]) -> None:
    assert has_dropout(run_of(model="tiny", dropout=0.5, steps=1))
    assert not has_dropout(run_of(model="tiny", steps=1))


def test_a_seed_decides_weights_and_order(run_of: Callable[..., Seen]) -> None:
    one, same, other = (run_of(seed=seed, steps=1) for seed in (1, 1, 2))
    ids = [seen.batches[0][0].ids_BT for seen in (one, same, other)]
    assert torch.equal(one.initial, same.initial)
    assert torch.equal(ids[0], ids[1])
    assert not torch.equal(one.initial, other.initial)
    assert not torch.equal(ids[0], ids[2])
