"""Simulated steps take the memory of real steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import RUNS, make_config
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.memory import PeakBytes, RunPlan
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.loop.loaders import SplitLoaders
from tokenfeed.trainer.models.gpt import SIZES, ModelSize
from tokenfeed.trainer.optim.train_state import Learner, Tally
from tokenfeed.trainer.tasks import vocabulary_loss

CPU = torch.device("cpu")
WAYS: dict[str, dict[str, Any]] = {
    "lm packed": RUNS["lm packed"],
    "classify padded": RUNS["classify padded"],
    "bf16": RUNS["lm packed"] | {"precision": "bf16"},
    "muon": RUNS["lm packed"] | {"optimizer": "muon"},
    "recomputed": RUNS["complete packed"] | {"recompute": True, "dropout": 0.1},
}
SIZE = ModelSize(layers=2, width=64, heads=2)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", SIZE)
    monkeypatch.setattr(vocabulary_loss, "WORTH_BYTES", 0)


def plan_of(every_task: Path, **settings: Any) -> tuple[Any, RunPlan]:
    shards = every_task / settings.pop("shards")
    sizes = {"model": "tiny", "micro_batch_tokens": 512, "step_tokens": 1024}
    config = make_config(shards, every_task / "run", **sizes | settings)
    return config, RunPlan(config, on_gpu=False)


def real_steps(config: Any, planned: RunPlan, memory: Any) -> Learner:
    """The steps that are predicted, with values."""
    learner = Learner(config, planned.task, World(CPU))
    rows, length = planned.shape(config)
    like = SplitLoaders(config, planned.task, CPU).first()
    with memory:
        for parameter in learner.model.parameters():
            if isinstance(memory, PeakBytes):
                memory.add(parameter)
        for step in (1, 2):
            tally = Tally.zero(CPU)
            for _ in range(2):
                shown = like.blank_like(rows, length)
                tally.add(learner.add_gradients(shown), 0, 0)
                del shown
            learner.step(step, tally.loss, tally.targets)
    return learner


@pytest.mark.long  # `test_named_cuda.py` compares predicted peaks of most of them
@pytest.mark.parametrize("way", ["bf16", "muon", "classify padded", "recomputed"])
def test_the_peak_is_that_of_the_tensors_of_real_steps(way: str, every_task: Path) -> None:
    config, planned = plan_of(every_task, **WAYS[way])
    memory = PeakBytes()
    real_steps(config, planned, memory)
    assert planned.peak(config) == pytest.approx(memory.peak, rel=0.002)


@pytest.mark.slow
def test_the_peak_is_that_of_what_is_really_allocated(every_task: Path) -> None:
    config, planned = plan_of(every_task, **WAYS["recomputed"])
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    learner = real_steps(config, planned, profiler)
    weights = sum(parameter.nbytes for parameter in learner.model.parameters())
    assert planned.peak(config) == pytest.approx(weights + allocated(profiler), rel=0.05)


def allocated(profiler: Any) -> int:
    """The most bytes above those at its begin that the allocator had given out."""
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
