"""litgpt over shards, with workers: what it receives, and where it resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub_models import write_shards


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

    from tokenfeed.integrations.litgpt import ShardData

    monkeypatch.setattr(pretrain, "save_hyperparameters", lambda *_, **__: None)  # of a command
    sizes = {"block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 8, "padded_vocab_size": 97}

    def run(folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
        pretrain.setup(
            "tiny",
            Config(name="tiny", **sizes),
            folder,
            precision="32-true",
            data=ShardData(str(shards)),
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
