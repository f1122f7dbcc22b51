"""--trainable: only the weights that match are trained, and all others stay as they are."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub_models import save_model, write_shards
from support.training import assert_same_run, go_on_from, load_weights, make_config, run

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.trainer.loop.trainer import Trainer

TOP = "blocks.1.*,norm.*"


def initial_weights(config: Any) -> dict[str, torch.Tensor]:
    with contextlib.closing(Trainer(config)) as trainer:
        return copy.deepcopy(trainer.learner.model.state_dict())


def test_weights_without_effect_on_the_loss_are_refused(counting: Path, tmp_path: Path) -> None:
    unused = {"model": "support.training:convolving_model", "trainable": "convolution.*"}
    with pytest.raises(ConfigError, match="the loss does not depend on any of these weights"):
        run(make_config(counting, tmp_path, **unused))


def test_resume_with_fewer_trained_weights_names_the_option(counting: Path, tmp_path: Path) -> None:
    run(make_config(counting, tmp_path), stop_after=4)
    with pytest.raises(ResumeError, match="same --model, --lora and --trainable"):
        run(make_config(counting, tmp_path, resume=True, trainable=TOP))


def test_adapters_and_matching_weights_are_trained_together(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    shards = write_shards(tmp_path / "shards", "lm")
    model = f"hf:{save_model(tmp_path / 'llama', 'CausalLM', 'Llama')}"
    named = "lm_head*,model.layers.1.mlp.up_proj*"  # the second one has adapters beside it
    settings = {"model": model, "lora": 2, "trainable": named, "precision": "bf16"}
    config = make_config(shards, tmp_path / "run", **settings)
    before = initial_weights(config)
    run(config)
    go_on_from(config.run_dir, 4, make_config(shards, tmp_path / "rest", **settings))
    assert_same_run(config.run_dir, tmp_path / "rest", 8)
    after = load_weights(tmp_path / "run", 8)
    whole = {name for name in after if "lora_" not in name}
    assert whole == {
        "model.lm_head.weight",
        "model.model.layers.1.mlp.up_proj.base_layer.weight",
    }
    assert all(w.dtype == torch.float32 for w in after.values())
    assert any("q_proj.lora_B" in name for name in after)
    assert not any(torch.equal(after[name], before[name].float()) for name in after)
