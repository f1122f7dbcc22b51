"""`--micro-batch-tokens auto`: the largest micro-batch that is predicted to fit."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.commands import call
from support.training import RUNS, make_config, read_metrics, run

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools import train
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.feeding.batch_policy import (
    make_policy,
    possible_sizes,
    shapes,
)
from tokenfeed.trainer.loop import trainer as loop
from tokenfeed.trainer.sensors.gpu import peak_tflops
from tokenfeed.trainer.sizing.run_plan import Gpu, RunPlan, choose_micro_batch, largest_fitting
from tokenfeed.trainer.tasks.registry import task_of

Sizes = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=40, unique=True).map(sorted)


@given(sizes=Sizes, limit=st.integers(0, 1 << 20))
def test_bisection_finds_the_largest_size_that_fits(sizes: list[int], limit: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    fitting = [size for size in sizes if size <= limit]
    assert largest_fitting(fits, sizes) == (fitting[-1] if fitting else None)
    assert len(tried) <= len(sizes).bit_length()


@given(
    step=st.integers(1, 64),
    length=st.integers(1, 5).map(lambda times: 64 * times),
    packed=st.booleans(),
    longest=st.integers(1, 400),
    compiled=st.booleans(),
    by_rows=st.booleans(),
)
def test_every_size_makes_the_same_step(
    step: int, length: int, packed: bool, longest: int, compiled: bool, by_rows: bool
) -> None:
    config = TrainConfig(
        shards="out",
        sequence_length=length,
        step_tokens=2 * step * length,
        micro_batch_tokens=2 * step * length,
        step_rows=2 * step if by_rows else None,
        compile=compiled,
        batching="packed" if packed else "padded",
    )
    split = SimpleNamespace(longest_row=longest)
    manifest = SimpleNamespace(split=lambda _: split)
    task: Any = SimpleNamespace(head=SimpleNamespace(causal=packed), manifest=manifest)
    sizes = possible_sizes(config, task)
    assert sizes == sorted(set(sizes))
    for size in sizes:
        changed = dataclasses.replace(config, micro_batch_tokens=size)
        changed.check()
        policy = make_policy(changed, packed=packed, on_gpu=True)
        assert changed.accumulation * (changed.rows if by_rows else size) == (
            2 * step if by_rows else config.step_tokens
        )
        if compiled and not by_rows:
            assert shapes(policy, longest)


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA A40", 149.7),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", 65),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A400", None),
        ("something else", None),
    ],
)
def test_a_gpu_that_is_there_has_a_speed_only_where_it_is_certain(
    device: str, tflops: float | None
) -> None:
    assert peak_tflops(device) == tflops


CPU, H100 = torch.device("cpu"), Gpu(free_bytes=79 << 30)
ONE_LAYER = "support.training:one_layer_model"


def auto(every_task: Path, folder: Path, way: str, **settings: Any) -> TrainConfig:
    given = RUNS[way] | {"model": ONE_LAYER, "steps": 3, "step_tokens": 384} | settings
    given |= {"micro_batch_tokens": "auto"}
    return make_config(every_task / given.pop("shards"), folder, **given)


def with_size(config: TrainConfig, size: int) -> TrainConfig:
    return dataclasses.replace(config, micro_batch_tokens=size)


def gpu_for(config: TrainConfig, size: int) -> Gpu:
    """A GPU in which micro-batches of this size just fit."""
    peak = RunPlan(with_size(config, size), H100).peak(with_size(config, size))
    return Gpu(free_bytes=int(1.01 * peak / 0.92))


@pytest.mark.slow
def test_auto_takes_the_largest_that_fits_every_rank(
    every_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = auto(every_task, tmp_path / "run", "classify padded")
    sizes = possible_sizes(config, task_of(config, CPU))
    size = sizes[len(sizes) // 2]
    found = choose_micro_batch(config, World(CPU), gpu_for(config, size))
    assert found == with_size(config, size)
    monkeypatch.setattr(World, "all_gather", lambda _, own: [own, sizes[0]])
    monkeypatch.setattr(RunPlan, "fitting", lambda *_: size)  # as found above
    found = choose_micro_batch(config, World(CPU), H100)
    assert found == with_size(config, sizes[0])


@pytest.mark.slow
def test_auto_names_the_remedies_if_nothing_fits(every_task: Path, tmp_path: Path) -> None:
    config, gpu = auto(every_task, tmp_path / "run", "lm packed"), Gpu(free_bytes=100_000)
    with pytest.raises(ConfigError, match=r"`--micro-batch-tokens`=auto: \d+ tokens, .* Try"):
        choose_micro_batch(config, World(CPU), gpu)


class Looking(torch.nn.Module):
    """A model that looks at values."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(head.outputs))

    def forward(self, micro_batch: Any) -> torch.Tensor:
        if float(self.weight.sum()) > 0:
            return micro_batch.ids_BT[..., None] * self.weight
        raise AssertionError


def test_auto_asks_for_a_number_if_a_model_cannot_be_predicted(
    every_task: Path, tmp_path: Path
) -> None:
    config = auto(every_task, tmp_path / "run", "lm packed", model=f"{__name__}:Looking")
    with pytest.raises(ConfigError, match=r"cannot be predicted \(.*\)\. Give a number") as caught:
        choose_micro_batch(config, World(CPU), H100)
    assert "\n" not in str(caught.value)


def test_a_run_with_auto_is_the_run_with_the_number(
    every_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = auto(every_task, tmp_path / "auto", "lm packed", dropout=0.1)
    size = possible_sizes(config, task_of(config, CPU))[1]
    monkeypatch.setattr(loop, "gpu_of", lambda _: gpu_for(config, size))
    run(config, stop_after=2)
    written = TrainConfig.of_run(config.run_dir)
    assert written is not None
    assert written.micro_batch_tokens == size
    monkeypatch.setattr(loop, "gpu_of", lambda _: H100)
    run(dataclasses.replace(config, resume=True))  # keeps the number
    run(dataclasses.replace(with_size(config, size), run_dir=tmp_path / "number"))
    for key in ("loss", "validation_loss"):
        found, wanted = (read_metrics(tmp_path / name, key) for name in ("auto", "number"))
        assert wanted.items() <= found.items()


def test_a_cpu_takes_no_more_than_it_has_use_for(every_task: Path, tmp_path: Path) -> None:
    config = auto(every_task, tmp_path / "run", "lm packed", step_tokens=6144)
    sizes = possible_sizes(config, task_of(config, CPU))
    found = choose_micro_batch(config, World(CPU), None)
    assert found.micro_batch_tokens == max(size for size in sizes if size <= 2048)


@pytest.mark.slow
def test_dry_run_announces_the_run_and_writes_nothing(
    every_task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    words = ("--shards", every_task / "lm", "--run-dir", tmp_path / "run", "--model", ONE_LAYER)
    sizes = ("--sequence-length", 32, "--micro-batch-tokens", 128, "--step-tokens", 512)
    call(train.main, *words, *sizes, "--device", "cpu", "--steps", 50, "--dry-run")
    announced = [record.getMessage().partition(":")[0] for record in caplog.records]
    expected = ["model", "memory", "data", "steps", "run", "memory of a step, with activations"]
    assert announced[-6:] == expected
    assert not (tmp_path / "run").exists()
