"""litgpt and torchtitan over shards, with workers: what they receive, and where they resume."""

import importlib
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.hub_models import write_shards

from tokenfeed import Packed, ShardLoader
from tokenfeed.pipeline.errors import ConfigError


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


@pytest.fixture
def torchtitan(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter, over torchtitan or a stand-in for its base class, which is not on PyPI with all
    that it imports."""
    try:
        import torchtitan.components.data.loader  # noqa: F401
    except ImportError:

        class BaseDataLoader:
            @dataclass(kw_only=True, slots=True)
            class Config:
                pass

        name = "torchtitan"
        for part in ("", ".components", ".components.data", ".components.data.loader"):
            monkeypatch.setitem(sys.modules, name + part, ModuleType(name + part))
        module: Any = sys.modules["torchtitan.components.data.loader"]
        module.BaseDataLoader = BaseDataLoader
    monkeypatch.delitem(sys.modules, "tokenfeed.integrations.torchtitan", raising=False)
    return importlib.import_module("tokenfeed.integrations.torchtitan").ShardDataLoader


def test_torchtitan_gets_flat_batches_of_its_rank(torchtitan: Any, shards: Path) -> None:
    sizes = {"max_context_length": 16, "num_tokens_per_batch": 64, "tokenizer": SimpleNamespace()}
    config = torchtitan.Config(path=str(shards), seed=3)
    loaders = [torchtitan(config, dp_world_size=2, dp_rank=rank, **sizes) for rank in range(2)]
    seen = []
    for rank, loader in enumerate(loaders):
        batching = Packed(16, 4, split=True, fill=True)
        plain = ShardLoader(shards, batching=batching, seed=3, epochs=None, rank=rank, world_size=2)
        for (inputs, labels), batch in zip(islice(loader, 5), plain, strict=False):
            assert inputs["input"].tolist() == batch.input_ids.flatten().tolist()
            assert inputs["positions"].tolist() == batch.position_ids.flatten().tolist()
            assert labels.tolist() == batch.targets.flatten().tolist()
            assert labels.shape == (64,)
            seen += batch.rows.tolist()
        plain.close()
        state = loader.state_dict()
        expected = [labels.tolist() for _, labels in islice(loader, 3)]
        again = torchtitan(config, dp_world_size=2, dp_rank=rank, **sizes)
        again.load_state_dict({})
        again.load_state_dict(state)
        assert [labels.tolist() for _, labels in islice(again, 3)] == expected
        loader.close()
        again.close()
    assert len({*seen}) > 20
    with pytest.raises(ConfigError, match="not a multiple of `max_context_length`=48"):
        torchtitan(config, dp_world_size=1, dp_rank=0, **sizes | {"max_context_length": 48})
