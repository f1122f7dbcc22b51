"""litgpt and Ray Train over shards: what they receive, and where they resume."""

import json
import subprocess
import sys
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PROGRAMS, ROOT
from support.hub_models import write_shards

from tokenfeed import Packed, ShardLoader
from tokenfeed.integrations.steps import steps


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("lm") / "shards", "lm")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_litgpt_pretrains_and_resumes_on_shards(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("litgpt", exc_type=ImportError)
    from litgpt import Config, pretrain
    from litgpt.args import EvalArgs, TrainArgs

    monkeypatch.syspath_prepend(ROOT / "recipes")
    example = import_module("litgpt_data")
    monkeypatch.setattr(pretrain, "save_hyperparameters", lambda *_, **__: None)  # of a command
    sizes = {"block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 8, "padded_vocab_size": 97}

    def run(folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
        pretrain.setup(
            "tiny",
            Config(name="tiny", **sizes),
            folder,
            precision="32-true",
            data=example.ShardData(str(shards)),
            train=TrainArgs(
                global_batch_size=2,
                micro_batch_size=2,
                max_tokens=10 * 2 * 16,
                max_norm=1.0,
                lr_warmup_steps=1,
                save_interval=5,
            ),
            eval=EvalArgs(interval=4, max_iters=2),
            devices=1,
            logger_name="csv",
            **settings,
        )
        saved = torch.load(folder / "final" / "lit_model.pth", weights_only=False)
        weights: dict[str, torch.Tensor] = saved["model"]
        return weights

    whole = run(tmp_path / "whole")
    resumed = run(
        tmp_path / "resumed", resume=tmp_path / "whole" / "step-00000005" / "lit_model.pth"
    )
    assert whole.keys() == resumed.keys()
    assert all(resumed[name].equal(whole[name]) for name in whole)


@pytest.mark.long
def test_ray_train_repeats_the_steps_after_the_checkpoint_of_a_killed_worker(
    shards: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    subprocess.run([sys.executable, PROGRAMS / "ray_ranks.py", shards, tmp_path], check=True)
    received: list[list[int]] = []
    for rank in range(2):
        lines = list(map(json.loads, (tmp_path / f"{rank}.jsonl").read_text().splitlines()))
        numbers = [number for number, _, _ in lines]
        assert numbers == [*range(10), *range(8, 12)]  # the checkpoint is of step 7
        last = {number: [rows, loss] for number, rows, loss in lines}
        assert all(last[number] == [rows, loss] for number, rows, loss in lines)
        received.append([row for number in range(12) for rows in last[number][0] for row in rows])
    settings: dict[str, Any] = {"batching": Packed(32, 2), "micro_batches_per_step": 2}
    with ShardLoader(shards, **settings, epochs=None, num_workers=0) as alone:
        some = [batch for step in islice(steps(alone), 12) for batch in step]
    expected = [row for batch in some for row in batch.rows.tolist()]
    assert sorted(received[0] + received[1]) == sorted(expected)
