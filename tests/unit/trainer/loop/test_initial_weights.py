"""--init-from: weights of another run, of its checkpoints, or of an exported folder."""

import contextlib
import copy
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.hub_models import save_model, write_shards
from support.training import (
    assert_same_run,
    go_on_from,
    load_weights,
    make_config,
    run,
    write_labelled,
)

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.loop.model_export import export_run
from tokenfeed.trainer.loop.trainer import Trainer


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    return {task: write_labelled(folder / task, task) for task in ("lm", "classify")}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hub")
    model = f"hf:{save_model(folder / 'llama', 'CausalLM', 'Llama')}"
    return {"shards": write_shards(folder / "rows", "lm"), "model": model}


def started(config: Any) -> dict[str, torch.Tensor]:
    """The weights before the first step."""
    with contextlib.closing(Trainer(config)) as trainer:
        return copy.deepcopy(trainer.learner.model.state_dict())


def assert_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    assert [name for name in some if not torch.equal(some[name], others[name])] == []


@pytest.mark.parametrize("model", ["shallow", "support.training:small_model"])
def test_a_run_starts_from_run_checkpoint_or_export(
    rows: dict[str, Path], tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    export = {"model": model, "export": tmp_path / "export", "keep": 9}
    report = run(make_config(rows["lm"], tmp_path / "run", **export))
    best = report.best_step
    assert best
    for source, step in (
        (tmp_path / "run", 8),
        (tmp_path / "run/checkpoints/step-00000004", 4),
        (tmp_path / "export", best),
    ):
        caplog.clear()
        new = make_config(rows["lm"], tmp_path / "new", model=model, seed=5, init_from=source)
        weights = started(new)
        saved = load_weights(tmp_path / "run", step)
        assert_equal({name: weights[name] for name in saved}, saved)
        assert "start at random" not in caplog.text
    run(new)
    go_on_from(
        tmp_path / "new",
        4,
        make_config(
            rows["lm"],
            tmp_path / "rest",
            **export | {"export": None, "keep": 2, "seed": 5, "init_from": tmp_path / "gone"},
        ),
    )
    assert_same_run(tmp_path / "new", tmp_path / "rest", 8)


@pytest.mark.parametrize("model", ["shallow", "support.training:small_model"])
def test_another_task_starts_from_run_and_export_alike(
    rows: dict[str, Path], tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    export = tmp_path / "export"
    run(make_config(rows["lm"], tmp_path / "run", model=model, steps=1, export=export))
    found = []
    for source in (tmp_path / "run", export):
        caplog.clear()
        config = make_config(rows["classify"], tmp_path / "new", model=model, init_from=source)
        found.append(started(config))
        assert "they start at random: head.bias, head.weight, pick" in caplog.text
        assert "no place" not in caplog.text
    assert_equal(*found)


def test_a_run_without_a_checkpoint_is_an_error(rows: dict[str, Path], tmp_path: Path) -> None:
    make_config(rows["lm"], tmp_path).write()
    with pytest.raises(ConfigError, match="this run has no checkpoint yet"):
        run(make_config(rows["lm"], tmp_path / "new", init_from=tmp_path))


ADAPTERS: dict[str, Any] = {"lora": 2, "learning_rate": 5e-2, "steps": 4, "warmup_steps": 0}


def test_the_same_adapters_go_on(hub: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run(make_config(**hub, run_dir=tmp_path / "run", **ADAPTERS))
    new = make_config(
        **hub, run_dir=tmp_path / "new", **ADAPTERS, lora_alpha=4, init_from=tmp_path / "run"
    )
    weights = started(new)
    saved = load_weights(tmp_path / "run", 4)
    assert saved
    assert_equal({name: weights[name] for name in saved}, saved)
    run(new)
    rest = make_config(**hub, run_dir=tmp_path / "rest", **ADAPTERS, init_from=tmp_path / "gone")
    (tmp_path / "rest").mkdir()
    go_on_from(tmp_path / "new", 4, rest)  # nothing of the first run is needed


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"lora": None}, {"lora": 3}, {"lora": 2, "lora_target": "q_proj"}]
)
def test_other_adapters_are_merged_first(
    hub: dict[str, Any], tmp_path: Path, more: dict[str, Any]
) -> None:
    pytest.importorskip("peft")
    first = make_config(
        **hub, run_dir=tmp_path / "run", **ADAPTERS, trainable="lm_head*", eval_every=99
    )
    run(first)
    export_run(first, tmp_path / "export", None)
    merged = load_file(tmp_path / "export/model.safetensors")
    new = make_config(
        **hub, run_dir=tmp_path / "new", **ADAPTERS | more, init_from=tmp_path / "run"
    )
    weights = {
        name.removeprefix("model.").replace(".base_layer.", "."): weight
        for name, weight in started(new).items()
        if "lora_" not in name
    }
    assert_equal({name: weights[name] for name in merged}, merged)
    report = run(new)
    assert (report.trained_parameters == report.parameters) == (more["lora"] is None)
    assert_same_model_resumes(new, tmp_path / "rest")


def assert_same_model_resumes(config: Any, rest: Path) -> None:
    """A run resumes without the run that it began from."""
    again = dataclasses.replace(config, run_dir=rest, steps=6, init_from=Path("gone"))
    whole = dataclasses.replace(config, run_dir=rest.with_name("whole"), steps=6)
    shutil.rmtree(rest, ignore_errors=True)
    run(whole)
    go_on_from(whole.run_dir, 4, again)
    assert_same_run(whole.run_dir, rest, 6)


def test_adapters_of_another_model_are_an_error(hub: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run(make_config(**hub, run_dir=tmp_path / "run", **ADAPTERS))
    other = hub | {"model": f"hf:{save_model(tmp_path / 'other', 'CausalLM', 'Llama')}"}
    with pytest.raises(ConfigError, match=r"has adapters for --model .*llama, and --model is"):
        run(make_config(**other, run_dir=tmp_path / "new", init_from=tmp_path / "run"))


def test_frozen_weights_in_half_precision_are_exported(hub: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    half: dict[str, Any] = {"precision": "bf16", **ADAPTERS}
    run(make_config(**hub, run_dir=tmp_path / "run", **half))
    new = make_config(
        **hub,
        run_dir=tmp_path / "new",
        **half,
        init_from=tmp_path / "run",
        export=tmp_path / "model",
    )
    run(new)
    weights = load_file(tmp_path / "model/model.safetensors")
    saved = load_weights(tmp_path / "new", 4)
    name = "model.embed_tokens.weight"
    assert torch.equal(weights[name], saved[f"model.{name}"].float())


def test_a_folder_without_weights_is_an_error(rows: dict[str, Path], tmp_path: Path) -> None:
    for source in (tmp_path / "missing", rows["lm"]):
        with pytest.raises(ConfigError, match="is neither a run of `train`, nor one of its"):
            run(make_config(rows["lm"], tmp_path / "new", init_from=source))


def test_a_damaged_export_is_an_error(rows: dict[str, Path], tmp_path: Path) -> None:
    run(make_config(rows["lm"], tmp_path / "run", export=tmp_path / "export", steps=1))
    (tmp_path / "export/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="the weights are damaged"):
        run(make_config(rows["lm"], tmp_path / "new", init_from=tmp_path / "export"))
