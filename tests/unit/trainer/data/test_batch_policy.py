"""What a run is advised to do about padding: what its tasks take, and what helps."""

import dataclasses
from pathlib import Path

import pytest
import torch
from support.training import LONGEST, RUNS, make_config

from tokenfeed import Packed, ShardLoader
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.datasets import epoch_of, is_packed, make_policy
from tokenfeed.trainer.loop.loaders import SplitLoaders
from tokenfeed.trainer.report.progress_lines import padding_remedy
from tokenfeed.trainer.tasks.registry import task_of

CPU = torch.device("cpu")


def remedy(config: TrainConfig) -> str:
    return padding_remedy(config, task_of(config, CPU))


def takes_packing(config: TrainConfig) -> bool:
    packed = dataclasses.replace(config, batching="packed")
    try:
        SplitLoaders(packed, task_of(packed, CPU), CPU)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("way", RUNS)
def test_packing_is_advised_where_it_is_taken_and_would_change_something(
    every_task: Path, tmp_path: Path, way: str
) -> None:
    settings = dict(RUNS[way])
    config = make_config(every_task / settings.pop("shards"), tmp_path, **settings)
    is_padded = config.batching == "padded"
    assert ("--batching packed" in remedy(config)) == (is_padded and takes_packing(config))


def test_balanced_attention_is_a_setting_of_packed_rows(every_task: Path, tmp_path: Path) -> None:
    packed = make_config(every_task / "lm", tmp_path, balance_attention=True)
    policy = SplitLoaders(packed, task_of(packed, CPU), CPU).policy
    assert isinstance(policy, Packed)
    assert policy.balance_attention


def test_what_is_advised_instead_means_less_padding(every_task: Path, tmp_path: Path) -> None:
    config = make_config(every_task / "classify", tmp_path)
    assert "lower `--micro-batch-tokens`" in remedy(config)
    sizes = [rows * LONGEST for rows in (16, 8, 4, 2)]
    wastes = [waste(dataclasses.replace(config, micro_batch_tokens=size)) for size in sizes]
    assert wastes == sorted(wastes, reverse=True)
    assert wastes[-1] < 0.7 * wastes[0]


def waste(config: TrainConfig) -> float:
    """The padding of an epoch."""
    policy = make_policy(config, packed=False, on_gpu=False)
    with ShardLoader(config.shards, batching=policy, num_workers=0) as loader:
        assert all(loader)
        return loader.stats().padding


@pytest.mark.parametrize("way", RUNS)
def test_estimate_of_an_epoch_is_near_what_is_delivered(way: str, every_task: Path) -> None:
    settings = RUNS[way] | {"micro_batch_tokens": 128, "step_tokens": 128}
    config = make_config(every_task / settings.pop("shards"), every_task / "run", **settings)
    manifest = Manifest.read(config.shards)
    policy = make_policy(config, packed=is_packed(config, manifest), on_gpu=False)
    found = epoch_of(config, manifest, on_gpu=False)
    with ShardLoader(config.shards, batching=policy, num_workers=0) as loader:
        assert found.steps == pytest.approx(sum(1 for _ in loader), rel=0.1)
