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
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.step import add_gradients

TOP = "blocks.1.*,norm.*"


def is_top(name: str) -> bool:
    return name.startswith(("blocks.1.", "norm."))


def initial_weights(config: Any) -> dict[str, torch.Tensor]:
    with contextlib.closing(Trainer(config)) as trainer:
        return copy.deepcopy(trainer.learner.model.state_dict())


@pytest.mark.parametrize("more", [{}, {"recompute": True}, {"optimizer": "muon"}])
def test_frozen_weights_stay_and_matching_weights_move(
    counting: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    config = make_config(counting, tmp_path, trainable=TOP, **more)
    before = initial_weights(config)
    report = run(config)
    after = load_weights(tmp_path, 8)
    assert {name for name in after if not torch.equal(after[name], before[name])} == {
        name for name in after if is_top(name)
    }
    assert report.trained_parameters == sum(w.numel() for n, w in after.items() if is_top(n))
    assert "of them trained" in report.summary()


def test_frozen_weights_have_no_moments_and_no_graph_below(counting: Path, tmp_path: Path) -> None:
    needs: list[bool] = []
    with contextlib.closing(Trainer(make_config(counting, tmp_path, trainable=TOP))) as trainer:
        learner: Learner = trainer.learner
        trained = {w for group in learner.optimizer.param_groups for w in group["params"]}
        assert trained == {w for name, w in learner.model.named_parameters() if is_top(name)}
        for block in learner.model.blocks:  # type: ignore[union-attr]
            block.register_forward_hook(lambda _, __, out: needs.append(out.requires_grad))
        add_gradients(learner, trainer.loaders.shape(next(iter(trainer.loader))))
    assert needs == [False, True]


def test_a_run_with_frozen_weights_resumes_exactly(counting: Path, tmp_path: Path) -> None:
    run(make_config(counting, tmp_path / "whole", trainable=TOP))
    go_on_from(tmp_path / "whole", 4, make_config(counting, tmp_path / "rest", trainable=TOP))
    assert_same_run(tmp_path / "whole", tmp_path / "rest", 8)


def test_number_of_trained_parameters_is_logged(
    counting: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run(make_config(counting, tmp_path, trainable="norm.*", steps=1))
    assert "without the embedding), 64 trained, fp32 on cpu" in caplog.text


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("blocks.1.*,nrom.weight", r"matches 'nrom.weight'. The closest names are norm.weight, "),
        ("blocks.7.*", r"no parameter of .* matches 'blocks.7.\*'. The closest names are blocks."),
        ("", r"matches ''. The closest"),
    ],
)
def test_a_pattern_without_a_match_names_the_closest(
    counting: Path, tmp_path: Path, patterns: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(make_config(counting, tmp_path, trainable=patterns))


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
    assert not any(torch.equal(after[name], before[name].float()) for name in whole)
