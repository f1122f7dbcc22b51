"""What a run is advised to do about padding: what its tasks take, and what helps."""

from pathlib import Path

import pytest
from support.training import RUNS, make_config

from tokenfeed import ShardLoader
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.data.datasets import epoch_of, is_packed, make_policy


@pytest.mark.parametrize("way", RUNS)
def test_estimate_of_an_epoch_is_near_what_is_delivered(way: str, every_task: Path) -> None:
    settings = RUNS[way] | {"micro_batch_tokens": 128, "step_tokens": 128}
    config = make_config(every_task / settings.pop("shards"), every_task / "run", **settings)
    manifest = Manifest.read(config.shards)
    policy = make_policy(config, packed=is_packed(config, manifest), on_gpu=False)
    found = epoch_of(config, manifest, on_gpu=False)
    with ShardLoader(config.shards, batching=policy, num_workers=0) as loader:
        assert found.steps == pytest.approx(sum(1 for _ in loader), rel=0.1)


def test_sequence_above_the_micro_batch_is_as_long_as_the_micro_batch(every_task: Path) -> None:
    settings = {"sequence_length": 100, "micro_batch_tokens": 64, "step_tokens": 64}
    config = make_config(every_task / "classify", every_task / "run", **settings)
    policy = make_policy(config, packed=False, on_gpu=False)
    assert policy.longest_piece == 64
