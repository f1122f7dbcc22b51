"""The five situations of benchmarks/scenarios/: a loop as people write it, and `train` for it."""

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.scenarios import before as scenarios_before
from benchmarks.scenarios.before import BLOCK, IGNORED, Encoder, Loop, new_model
from benchmarks.scenarios.data import Data
from benchmarks.scenarios.disk import CLOUD_VOLUME, checkpoints_on
from benchmarks.scenarios.watch import Marks, Watch
from tokenfeed.trainer.stall import StallMeter

__all__ = ["SCENARIOS", "SIDES", "Outcome", "Scenario"]

MOST_HELD_OUT = 400
"""Rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One situation."""

    said: str
    """As people say it."""
    data: str
    loop: Loop
    steps: int
    """Of the loop."""
    settings: dict[str, Any]
    """Of `train`."""

    @property
    def rows(self) -> int:
        """Trained in all, on both sides."""
        return self.steps * self.loop.rows

    def rate(self, side: str) -> float:
        """The learning rate of a side."""
        rate: float = self.loop.rate if side == "before" else self.settings["learning_rate"]
        return rate


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left."""

    marks: Marks
    stall: dict[str, float]
    """Share of the time by cause."""
    loss: float
    """Of held-out rows, at the end."""


SCENARIOS: dict[str, Scenario] = {
    "a": Scenario(
        said="tokenizing in the loop, batches of 1",
        data="docstrings",
        loop=Loop(batches=scenarios_before.RowByRow, rows=1, rate=3e-4),
        steps=1200,
        settings={"step_rows": 8, "learning_rate": 1e-3},
    ),
    "b": Scenario(
        said="padded to 192 in batches of 8",
        data="docstrings",
        loop=Loop(batches=scenarios_before.padded_when_needed, rows=8, rate=1e-3),
        steps=150,
        settings={"step_rows": 8, "learning_rate": 1e-3},
    ),
    "c": Scenario(
        said="25 examples, many epochs",
        data="commands",
        loop=Loop(batches=scenarios_before.few_by_workers, rows=5, rate=1e-3, save_every=5),
        steps=200,
        settings={"step_rows": 5, "learning_rate": 1e-3, "batching": "padded", "save_every": 5},
    ),
    "d": Scenario(
        said="tweets padded to 128 in batches of 8",
        data="comments",
        loop=Loop(batches=scenarios_before.padded_beforehand, rows=8, rate=1e-3),
        steps=200,
        settings={"step_rows": 8, "learning_rate": 1.5e-3},
    ),
    "e": Scenario(
        said="a checkpoint every 5 steps, to a cloud volume",
        data="files",
        loop=Loop(
            batches=scenarios_before.sequences, rows=2, rate=1e-3, save_every=5, disk=CLOUD_VOLUME
        ),
        steps=100,
        settings={"step_tokens": 2 * BLOCK, "learning_rate": 1e-3, "save_every": 5},
    ),
}


def before(scenario: Scenario, data: Data, seed: int) -> Outcome:
    """The loop as it was."""
    torch.manual_seed(seed)
    watch = Watch(scenario.steps)
    with tempfile.TemporaryDirectory() as folder:
        model = scenarios_before.train(data, scenario.loop, scenario.steps, watch, Path(folder))
    return Outcome(watch.marks, stall_of(watch.meter), held_out_loss(model, data))


def after(scenario: Scenario, data: Data, seed: int) -> Outcome:
    """`train` on the same rows."""
    from tokenfeed.trainer.config.run_config import (
        TrainConfig,  # the loop before knows nothing of it
    )
    from tokenfeed.trainer.loop.trainer import Trainer

    marks = Marks()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        settings = settings_of(scenario, data)
        trainer = Trainer(TrainConfig(**settings, seed=seed, run_dir=Path(folder) / "run"))
        stack.callback(trainer.close)

        counted = trainer.step_sync

        def after_step() -> bool:
            if marks.wall:
                marks.count(counted.tokens, counted.slots)  # up to the step before
            marks.end_step()
            return False

        stack.enter_context(checkpoints_on(scenario.loop.disk))
        trainer.train(after_step)
        marks.count(counted.tokens, counted.slots)
        trainer.saver.wait()
        stall = stall_of(trainer.stall)
        model = new_model(data)
        model.load_state_dict(trainer.learner.model.model.state_dict())
    return Outcome(marks, stall, held_out_loss(model, data))


def stall_of(meter: StallMeter) -> dict[str, float]:
    """Share of the time by cause."""
    return {cause: part.fraction for cause, part in meter.report().causes.items()}


def settings_of(scenario: Scenario, data: Data) -> dict[str, Any]:
    """Those of `train`, but for the folder of the run."""
    asked = scenario.settings
    length = {"docstrings": 192, "comments": 128, "commands": 64, "files": BLOCK}[scenario.data]
    rows = asked.get("step_rows") or asked["step_tokens"] // length
    steps = scenario.rows // rows
    return {
        "shards": str(data.shards),
        "model": f"hf:{data.model}",
        "from_scratch": True,
        "steps": steps,
        "sequence_length": length,
        "micro_batch_tokens": rows * length,
        "warmup_steps": steps // 10,
        "weight_decay": 0.01,
        "schedule": "linear",
        "eval_every": steps,
        "save_every": steps,
        "eval_tokens": 1,
        "device": "cpu",
    } | asked


@torch.no_grad()
def held_out_loss(model: Any, data: Data) -> float:
    """Mean over the targets of held-out rows, whoever trained the model."""
    encoder = Encoder(data)
    rows = encoder.encode(data.held_out)[:MOST_HELD_OUT]
    model.eval()
    losses = [losses_of(model, encoder.pad(rows[at : at + 20])) for at in range(0, len(rows), 20)]
    return float(torch.cat(losses).mean())


def losses_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    labels = batch.pop("labels")
    logits = model(**batch).logits
    if labels.dim() > 1:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, labels, reduction="none")[labels != IGNORED]


SIDES: dict[str, Callable[[Scenario, Data, int], Outcome]] = {"before": before, "after": after}
