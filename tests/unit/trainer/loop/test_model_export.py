"""Exported folders: whole or absent, and the way back from them."""

import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.hub_models import VOCABULARY, write_shards
from support.training import load_weights, make_config, run
from torch import nn

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.micro_batch import Head, MicroBatch
from tokenfeed.trainer.loop import model_export
from tokenfeed.trainer.loop.model_export import Exported, load_exported
from tokenfeed.trainer.report.run_files import Report

IDS = torch.randint(2, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(2))


class Bigram(nn.Module):
    """A model of somebody's own, with weights tied."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.embedding = nn.Embedding(head.vocabulary_size, 16)
        self.head = nn.Linear(16, head.vocabulary_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(micro_batch.ids_BT))
        return logits


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("lm") / "shards", "lm")


@pytest.fixture(scope="module")
def finished(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The settings of a finished run, which was exported to `exported` beside its folder."""
    folder = tmp_path_factory.mktemp("finished")
    config = make_config(documents, folder / "run", export=folder / "exported")
    run(config)
    return config


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> str:
    module = type("own_model", (), {"Bigram": Bigram})
    monkeypatch.setitem(__import__("sys").modules, "own_model", module)  # type: ignore[arg-type]
    return "own_model:Bigram"


@pytest.mark.slow
def test_an_exported_model_gives_the_logits_of_the_best_weights(
    documents: Path, own: str, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    report = run(make_config(documents, tmp_path / "run", model=own, export=folder))
    about = Exported.of(folder)
    assert about is not None
    assert report.best_step is not None
    best = Bigram(about.head)
    best.load_state_dict(load_weights(tmp_path / "run", report.best_step), strict=False)
    with torch.no_grad():
        got, expected = (
            each(MicroBatch.of_ids(IDS, causal=True)) for each in (load_exported(folder), best)
        )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert (about.step, about.task, about.model) == (report.best_step, "lm", own)
    assert about.metrics == report.metrics["validation"]


@pytest.mark.slow
def test_exported_built_in_decoder_has_equal_logits_in_transformers(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "exported"
    run(
        make_config(documents, tmp_path / "run", model="shallow", export=folder, learning_rate=1e-2)
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with monkeypatch.context() as without, torch.no_grad():
        without.setitem(sys.modules, "transformers", None)  # type: ignore[arg-type]
        got = load_exported(folder)(MicroBatch.of_ids(IDS, causal=True))
    with torch.no_grad():
        torch.testing.assert_close(got, theirs(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)
    assert got.std() > 0.1  # the model has learnt something
    saved = [*folder.iterdir(), *(tmp_path / "run" / "checkpoints").glob("*/*")]
    assert len({path.stat().st_mode for path in saved}) == 1  # one mode for all files
    assert theirs.generate(IDS, max_new_tokens=3, do_sample=False).shape == (2, 15)
    continued = run(make_config(documents, tmp_path / "next", model=f"hf:{folder}", steps=1))
    before = Exported.of(folder)
    assert before is not None
    assert continued.validation_loss_first == pytest.approx(before.metrics["loss"], rel=1e-5)


def test_a_finished_run_is_exported_without_training(finished: TrainConfig, tmp_path: Path) -> None:
    report = Report.of_run(finished.run_dir)
    assert report is not None
    later = dataclasses.replace(finished, resume=True, export=tmp_path / "exported")
    assert run(later).steps == report.steps
    assert load_exported(tmp_path / "exported").state_dict()
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "exported").iterdir()}
    (finished.run_dir / "report.html").unlink()
    assert run(dataclasses.replace(later, resume="auto")).steps == report.steps
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "exported").iterdir()} == written
    assert (finished.run_dir / "report.html").exists()
    with pytest.raises(ConfigError, match=r"`--export`: .* exists already"):
        run(dataclasses.replace(later, steps=report.steps + 1))


def test_export_is_refused_before_training_where_nothing_can_be_written(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path or mode != os.W_OK)
    config = make_config(documents, tmp_path / "run", export=tmp_path / "a" / "b")
    with pytest.raises(ConfigError, match=rf"`--export`: .* {tmp_path} cannot be written\. Give"):
        run(config)
    assert not (tmp_path / "run").exists()


def test_export_rejects_data_replaced_since_training(documents: Path, tmp_path: Path) -> None:
    shards = shutil.copytree(documents, tmp_path / "shards")
    config = make_config(shards, tmp_path / "run", steps=1)
    run(config)
    shutil.rmtree(shards)
    write_shards(shards, "lm", rows=61)
    later = dataclasses.replace(config, resume=True, export=tmp_path / "exported")
    with pytest.raises(ResumeError, match="cannot resume"):
        run(later)
    assert not (tmp_path / "exported").exists()


def test_a_damaged_description_is_rejected(finished: TrainConfig, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.run_dir.with_name("exported"), tmp_path / "exported")
    (folder / "tokenfeed.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenfeed\.json: is damaged"):
        load_exported(folder)


def test_weights_of_another_version_are_rejected_in_one_line(
    finished: TrainConfig, tmp_path: Path
) -> None:
    folder = shutil.copytree(finished.run_dir.with_name("exported"), tmp_path / "exported")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    name = min(weights)
    del weights[name]
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"the weights do not fit.*{name}") as caught:
        load_exported(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("export", ["mine", "runs/one", "runs", "runs/checkpoints/.."])
def test_a_folder_that_is_there_or_will_hold_the_run_is_refused_before_training(
    export: str, documents: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    config = make_config(documents, tmp_path / "runs" / "one", export=tmp_path / export)
    with pytest.raises(ConfigError, match="--export"):
        run(config)
    assert not (tmp_path / "runs").exists()


def test_a_failed_export_leaves_nothing_and_can_be_repeated(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(documents, tmp_path / "run", steps=1, export=tmp_path / "out" / "exported")

    def refuse(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(model_export, "open_tokenizer", refuse)
        with pytest.raises(OSError, match="disk full"):
            run(config)
    assert list((tmp_path / "out").iterdir()) == []
    run(dataclasses.replace(config, resume=True))
    assert load_exported(tmp_path / "out" / "exported")


def test_what_is_no_export_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train --export"):
        load_exported(tmp_path)
