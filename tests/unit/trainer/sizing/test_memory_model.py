"""Simulated steps take the memory and operations of real steps, and predict a run."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support import hub_models
from support.training import RUNS, make_config
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.feeding.batch_policy import (
    EpochEstimate,
    is_packed,
    make_policy,
    possible_sizes,
)
from tokenfeed.trainer.feeding.loaders import SplitLoaders
from tokenfeed.trainer.models.transformer import SIZES, ModelSize
from tokenfeed.trainer.optim.precision import Precision
from tokenfeed.trainer.optim.train_state import Learner, Tally
from tokenfeed.trainer.sizing.run_plan import Gpu, PeakBytes, RunPlan
from tokenfeed.trainer.tasks import chunked_loss as vocabulary_loss
from tokenfeed.trainer.tasks.registry import task_of

CPU = torch.device("cpu")
WAYS: dict[str, dict[str, Any]] = {
    "lm packed": RUNS["lm packed"],
    "classify padded": RUNS["classify padded"],
    "bf16": RUNS["lm packed"] | {"precision": "bf16"},
    "fp16": RUNS["tag padded"] | {"precision": "fp16"},
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
    return config, RunPlan(config, None)


def real_steps(config: Any, planned: RunPlan, memory: Any) -> Learner:
    """The steps that are predicted, with values."""
    precision = Precision(planned.precision, CPU)
    learner = Learner(config, planned.task, precision, CPU)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        *("bf16", "muon"),
        *(
            pytest.param(way, marks=pytest.mark.long)
            for way in ("classify padded", "fp16", "recomputed")
        ),
    ],
)
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


@pytest.mark.parametrize("layers", [1, 3])
def test_operations_of_a_token_are_those_of_the_formula(
    layers: int, every_task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "tiny", dataclasses.replace(SIZE, layers=layers))
    _, planned = plan_of(every_task, **WAYS["lm packed"])
    in_products = 12 * layers * SIZE.width**2 + 64 * SIZE.width
    wanted = 6 * in_products + 12 * layers * SIZE.width * 32
    assert planned.learner.operations_per_token(32) == pytest.approx(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_operations_of_transformers_models_are_as_torch_counts(name: str, tmp_path: Path) -> None:
    folder = hub_models.save_model(tmp_path / "hub", "CausalLM", name)
    shards = hub_models.write_shards(tmp_path / "shards", "lm")
    config = hub_models.train_config(folder, shards=str(shards))
    learner = Learner(config, task_of(config, CPU), Precision("fp32", CPU), CPU)
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            on_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
        },
    )
    with counter, torch.no_grad():
        learner.model(MicroBatch.of_ids(torch.zeros((2, 32), dtype=torch.int64), causal=True))
    counted = 3 * counter.get_total_flops() / (2 * 32)
    assert learner.operations_per_token(32) == pytest.approx(counted)


def test_weights_that_are_not_trained_cost_two_operations_less(every_task: Path) -> None:
    _, whole = plan_of(every_task, **WAYS["lm packed"])
    frozen, cost = (
        whole.learner.model.blocks[0].feed_in.weight,
        whole.learner.operations_per_token(32),
    )
    frozen.requires_grad_(False)
    assert cost - whole.learner.operations_per_token(32) == pytest.approx(2 * frozen.numel())


@pytest.mark.parametrize("way", RUNS)
def test_estimate_of_an_epoch_is_near_what_is_delivered(way: str, every_task: Path) -> None:
    settings = RUNS[way] | {"micro_batch_tokens": 128, "step_tokens": 128}
    config = make_config(every_task / settings.pop("shards"), every_task / "run", **settings)
    manifest = Manifest.read(config.shards)
    policy = make_policy(config, packed=is_packed(config, manifest), on_gpu=False)
    found = EpochEstimate.of_split(manifest.split("train"), policy, config)
    with ShardLoader(config.shards, batching=policy, num_workers=0) as loader:
        assert found.steps == pytest.approx(sum(1 for _ in loader), rel=0.1)


@pytest.mark.slow
def test_what_fits_is_measured_to_fit_and_the_next_is_not(
    every_task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary_loss, "MOST_TOKENS", 512)
    config, _ = plan_of(every_task, **WAYS["lm packed"] | {"step_tokens": 1 << 12})
    gpu = Gpu(free_bytes=10 << 20)
    planned = RunPlan(config, gpu)
    found = planned.fitting(possible_sizes(config, planned.task))
    assert found is not None
    assert found < config.step_tokens
    fitting, larger = (
        dataclasses.replace(config, micro_batch_tokens=tokens) for tokens in (found, 2 * found)
    )
    assert planned.peak(fitting) <= 0.92 * gpu.free_bytes < planned.peak(larger)
