"""Runs whose data change: stages, lengths, skipped rows; and that they go on from anywhere."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.training import (
    assert_same_run,
    go_on_from,
    make_config,
    parsed,
    run,
)

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.config.run_config import StageSettings, TrainConfig
from tokenfeed.trainer.data.datasets import training_source
from tokenfeed.trainer.loop.loaders import SplitLoaders
from tokenfeed.trainer.report.run_files import Report
from tokenfeed.trainer.tasks.registry import make_task


@pytest.fixture(scope="module")
def mixing(sets: Path) -> tuple[StageSettings, ...]:
    code, prose = str(sets / "code"), str(sets / "prose")
    weights = {code: 1.0, prose: 3.0}
    first = StageSettings(shards=weights, until_tokens=1_500, sequence_length=16)
    return first, StageSettings(shards=code)


@pytest.fixture(scope="module")
def whole(
    sets: Path, mixing: tuple[StageSettings, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run that nothing disturbed, with a checkpoint of every step."""
    run_dir = tmp_path_factory.mktemp("whole")
    kept: dict[str, Any] = {"save_every": 1, "keep": 99, "steps": 10, "mixing": mixing}
    run(make_config(sets / "code", run_dir, **kept))
    return run_dir


def test_stages_of_a_run_that_goes_on_with_moved_folders_count_each_token_once(
    whole: Path,
    mixing: tuple[StageSettings, ...],
    sets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(sets)
    moved = (
        dataclasses.replace(mixing[0], shards={"code": 1.0, "prose": 3.0}),
        StageSettings(shards="code"),
    )
    go_on_from(whole, 7, make_config(Path("code"), tmp_path, steps=10, mixing=moved))
    report = Report.of_run(tmp_path)
    assert report
    assert sum(report.delivered.values()) == report.tokens
    assert {*report.delivered} == {"code", "prose"}


def test_a_run_whose_mixing_was_edited_equals_a_run_of_the_final_mixing(
    sets: Path, tmp_path: Path
) -> None:
    code, prose = str(sets / "code"), str(sets / "prose")
    first = StageSettings(shards={code: 1.0, prose: 3.0}, until_tokens=4_000)
    planned = (first, StageSettings(shards=code))
    edited = (
        first,
        StageSettings(shards={code: 1.0, prose: 1.0}, until_tokens=24_000),
        StageSettings(shards=prose),
    )
    even = {"schedule": "constant", "warmup_steps": 0, "save_every": 5, "eval_every": 5}

    def config(name: str, steps: int, mixing: tuple[StageSettings, ...], **more: Any) -> Any:
        settings = {**even, "steps": steps, "mixing": mixing, **more}
        return make_config(sets / "code", tmp_path / name, **settings)

    run(config("edited", 5, planned))
    run(config("edited", 30, edited, resume=True))
    run(config("whole", 30, edited))
    assert_same_run(tmp_path / "whole", tmp_path / "edited", 30)
    other = (StageSettings(shards={code: 1.0, prose: 1.0}, until_tokens=4_000), *planned[1:])
    with pytest.raises(ResumeError, match=r"from token 0 on, the share of .*code is 1/2"):
        run(config("edited", 40, other, resume=True))
    written = TrainConfig.of_run(tmp_path / "edited")
    assert written is not None
    assert written.mixing == edited


def test_order_skipped_rows_and_lengths_of_a_file_reach_the_loader(
    sets: Path, tmp_path: Path
) -> None:
    code = str(sets / "code")
    mixing = (
        StageSettings(shards=code, until_tokens=2_700, sequence_length=16),  # one reading
        StageSettings(shards=code),
    )
    plain, skipping = (
        make_config(code, tmp_path, mixing=mixing, order="file", skip=skip)
        for skip in (None, {code: ((1, 3),)})
    )
    task, cpu = make_task(plain, Manifest.read(code), torch.device("cpu")), torch.device("cpu")
    found = []
    for config in (plain, skipping):
        with SplitLoaders(config, task, cpu).train_loader() as loader:
            found.append(list(itertools.islice(loader, 30)))
    rows = np.concatenate([batch.rows for batch in found[0]])
    lengths = np.concatenate([batch.piece_lengths for batch in found[0]])
    assert (np.diff(rows) < 0).sum() == 1, "rows do not ascend in a reading"
    assert {batch["input_ids"].shape for batch in found[0][:20]} == {(8, 16)}
    assert found[0][-1]["input_ids"].shape == (4, 32)
    targets = [sum(batch.num_targets for batch in batches) for batches in found]
    assert targets[0] - targets[1] == (lengths - 1)[(rows == 1) | (rows == 2)].sum()
    changed = {"targets": "last", "until_tokens": 2_800}
    first = dataclasses.replace(mixing[0], **changed)
    source = training_source(dataclasses.replace(plain, mixing=(first, mixing[1])))
    found_first = source[0]  # type: ignore[index]
    assert {name: getattr(found_first, name) for name in changed} == changed


def test_mixing_that_contradicts_itself_is_refused(sets: Path, tmp_path: Path) -> None:
    code = str(sets / "code")
    ending, endless = StageSettings(shards=code, until_tokens=9_000), StageSettings(shards=code)
    longer, uneven = (StageSettings(shards=code, sequence_length=n) for n in (64, 24))
    for settings, message in (
        ({"mixing": (ending,)}, "`mixing`: the last stage goes on until the last step"),
        ({"mixing": (endless, endless)}, "stage 1 has no end"),
        ({"mixing": (longer,)}, "`mixing`: a stage has sequence_length 64, but the run has 32"),
        ({"mixing": (longer,), "step_rows": 8}, "needs steps of a number of tokens"),
        ({"mixing": (uneven,)}, "expected a multiple of --sequence-length=24"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(make_config(sets / "code", tmp_path, **settings))


def test_a_file_may_remove_all_skipped_rows(sets: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for skip in ({str(sets / "code"): [[1, 3]]}, {}):
        file.write_text(yaml.safe_dump({"shards": str(sets / "code"), "skip": skip}))
        config = parsed("--config", file, "--run-dir", tmp_path)
        config.write()
        begun = TrainConfig.of_run(tmp_path)
        assert begun is not None
        assert begun.skip == config.skip == dict.fromkeys(skip, ((1, 3),))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[{shard: a}]", "mixing 1: unknown setting shard\\b.*shards"),
        ("[{until_tokens: 5}]", "mixing 1: has no shards"),
        ("[{shards: a, until_step: 5}]", "mixing 1: unknown setting until_step.* use until_tokens"),
        ("[{shards: a, to: b}]", "mixing 1: unknown setting to. .* several stages, each with its"),
        ("[{shards: a, until_tokens: 0}]", "mixing 1: until_tokens: expected a number of tokens"),
        ("[3]", "mixing 1: expected settings"),
        ("3", "mixing: expected a list of settings, got 3"),
    ],
)
def test_mixing_of_a_file_that_cannot_be_read_is_refused_in_one_line(
    content: str, words: str, sets: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(f"mixing: {content}")
    with pytest.raises(ConfigError, match=words):
        parsed("--shards", sets / "code", "--config", tmp_path / "run.yaml").check()


def test_data_sets_of_a_later_stage_are_checked_at_the_start(sets: Path, tmp_path: Path) -> None:
    first = StageSettings(shards=str(sets / "code"), until_tokens=1_500)
    other_task = (first, StageSettings(shards=str(sets / "classes")))
    with pytest.raises(ConfigError, match="one task"):
        run(make_config(sets / "code", tmp_path, mixing=other_task))
    assert not (tmp_path / "checkpoints").exists()
