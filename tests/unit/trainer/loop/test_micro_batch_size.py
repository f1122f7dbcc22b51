"""`--micro-batch-tokens auto`: the largest micro-batch that fits."""

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.training import RUNS, make_config, one_layer_model, read_metrics, run
from torch.testing._internal.distributed.fake_pg import FakeStore

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.datasets import make_policy
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.loop.loaders import SplitLoaders, possible_sizes, shapes
from tokenfeed.trainer.loop.trainer import Trainer
from tokenfeed.trainer.tasks.registry import task_of


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


CPU = torch.device("cpu")
ONE_LAYER = "support.training:one_layer_model"
MOST = 128
"""Tokens of the largest micro-batch that `limited` has memory for."""


def limited(head: Any) -> torch.nn.Module:
    """A model that is out of memory with more than `MOST` tokens. It counts what it has seen."""
    model = one_layer_model(head)
    model.register_buffer("seen", torch.zeros(()))

    def check(module: torch.nn.Module, given: tuple[MicroBatch]) -> None:
        module.get_buffer("seen").add_(1)
        if module.training and given[0].num_slots > MOST:
            raise torch.OutOfMemoryError

    model.register_forward_pre_hook(check)
    return model


def auto(every_task: Path, folder: Path, way: str, **settings: Any) -> TrainConfig:
    given = RUNS[way] | {"model": f"{__name__}:limited", "steps": 3, "step_tokens": 384} | settings
    given |= {"micro_batch_tokens": "auto"}
    return make_config(every_task / given.pop("shards"), folder, **given)


@pytest.mark.parametrize("way", ["lm packed", "classify padded"])
def test_auto_takes_the_largest_size_that_fits(way: str, every_task: Path, tmp_path: Path) -> None:
    config = auto(every_task, tmp_path / "run", way)
    sizes = possible_sizes(config, task_of(config, CPU))
    with contextlib.closing(Trainer(config)) as trainer:
        found = trainer.config.micro_batch_slots
        assert found == max(size for size in sizes if size <= MOST)
        assert min(sizes) < found < max(sizes)
        assert trainer.learner.model.get_buffer("seen") == 0
        assert all(weight.grad is None for weight in trainer.learner.model.parameters())


def test_auto_takes_a_size_that_fits_every_rank(
    every_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = auto(every_task, tmp_path / "run", "lm packed", model=ONE_LAYER)
    sizes = possible_sizes(config, task_of(config, CPU))
    others = iter([0, 0, None, 0])  # of 32, 64, 128 and then 96 tokens
    monkeypatch.setattr(World, "all_gather", lambda _, own: [own, next(others)])
    with contextlib.closing(Trainer(config)) as trainer:
        assert trainer.config.micro_batch_slots == sizes[2] == 96


def test_auto_names_the_remedies_if_nothing_fits(every_task: Path, tmp_path: Path) -> None:
    config = auto(every_task, tmp_path / "run", "lm packed", sequence_length=384)
    with pytest.raises(ConfigError, match=r"`--micro-batch-tokens`=auto: 384 tokens, .* Try"):
        Trainer(config)


def test_a_run_with_auto_is_the_run_with_the_number(
    every_task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = auto(every_task, tmp_path / "auto", "lm packed", dropout=0.1)
    run(config, stop_after=2)
    written = TrainConfig.of_run(config.run_dir)
    assert written is not None
    with caplog.at_level("INFO"):
        run(dataclasses.replace(config, resume=True))
    assert "as when the run began" in caplog.text
    run(dataclasses.replace(written, resume=False, run_dir=tmp_path / "number"))
    for key in ("loss", "validation_loss"):
        found, wanted = (read_metrics(tmp_path / name, key) for name in ("auto", "number"))
        assert wanted.items() <= found.items()


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"step_rows": 1}, "Raise --step-rows to 2"),
        ({"step_rows": 4, "micro_batch_tokens": 128}, "Give 64"),
        ({"step_tokens": 32, "micro_batch_tokens": 32}, "Raise --step-tokens to 64"),
        ({"step_tokens": 128}, "Give 64"),
    ],
)
def test_step_with_fewer_micro_batches_than_ranks_names_what_helps(
    settings: dict[str, Any],
    remedy: str,
    counting: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    config = make_config(counting, tmp_path, **settings)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    request.addfinalizer(dist.destroy_process_group)
    said = f"2 ranks share 1 micro-batch of a step, so some would have none. {remedy}, or start at"
    with pytest.raises(ConfigError, match=f"{said} most 1 rank.$"):
        SplitLoaders(config, task_of(config, CPU), CPU).train_loader()
