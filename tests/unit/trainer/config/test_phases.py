"""Runs in phases: what trains, at which rate, on which data; and that they go on from anywhere."""

import dataclasses
import itertools
import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.training import (
    assert_same_run,
    go_on_from,
    load_state,
    load_weights,
    make_config,
    run,
    write_labelled,
)

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.train_settings import parse_config
from tokenfeed.trainer.checkpoints.checkpoint_format import part_of
from tokenfeed.trainer.config.run_config import PhaseSettings, StageSettings, TrainConfig
from tokenfeed.trainer.config.schedule import learning_rate, phase_at, phases_of
from tokenfeed.trainer.data.datasets import training_source
from tokenfeed.trainer.feeding.loaders import SplitLoaders
from tokenfeed.trainer.report.run_report import Report
from tokenfeed.trainer.sizing.dry_run import dry_run
from tokenfeed.trainer.tasks.registry import make_task

STEPS = (3, 4, 3)
PATTERNS = ("norm", r"norm|blocks\.0\.feed", ".")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    write_labelled(folder / "code", "lm", count=200)
    write_labelled(folder / "prose", "lm", count=80)
    write_labelled(folder / "classes", "classify", count=30)
    return folder


def phases(*changes: dict[str, Any]) -> tuple[PhaseSettings, ...]:
    """Three of them, with changes to the first, the second, ..."""
    pairs = itertools.zip_longest(STEPS, PATTERNS, changes, fillvalue={})
    return tuple(PhaseSettings(**{"steps": n, "trainable": p} | c) for n, p, c in pairs)  # type: ignore[dict-item]


def config_of(
    shards: Path, run_dir: Path, parts: tuple[PhaseSettings, ...], **changes: Any
) -> TrainConfig:
    return make_config(shards, run_dir, phases=parts, **{"steps": sum(STEPS)} | changes)


@pytest.fixture(scope="module")
def parts(folder: Path) -> dict[str, Any]:
    """Settings of a run whose phases differ in everything, and whose data change meanwhile."""
    code, prose = str(folder / "code"), str(folder / "prose")
    weights = {code: 1.0, prose: 3.0}
    first = StageSettings(shards=weights, until_tokens=1_500, sequence_length=16)
    return {
        "phases": phases({"learning_rate": 1e-2}, {"schedule": "linear", "warmup_steps": 0}),
        "mixing": (first, StageSettings(shards=code)),
        "steps": sum(STEPS),
    }


@pytest.fixture(scope="module")
def whole(
    folder: Path, parts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Runs of `parts` that nothing disturbed, with a checkpoint of every step, by optimizer."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("adamw", "muon")}
    for name, run_dir in found.items():
        kept = {"save_every": 1, "keep": 99, "optimizer": name}
        run(make_config(folder / "code", run_dir, **parts | kept))
    return found


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_each_phase_changes_what_it_names_and_nothing_else(
    name: str, whole: dict[str, Path]
) -> None:
    ends = list(itertools.accumulate(STEPS))
    for before, end, pattern in zip([1, *ends], ends, PATTERNS, strict=False):
        first, last = load_weights(whole[name], before), load_weights(whole[name], end)
        changed = {each for each in first if not torch.equal(first[each], last[each])}
        assert changed == {each for each in first if re.search(pattern, each)}


def test_the_report_shows_planned_and_delivered_tokens_of_each_stage(
    whole: dict[str, Path], folder: Path
) -> None:
    report = Report.of_run(whole["adamw"])
    assert report is not None
    first, second = report.stages
    code, prose = str(folder / "code"), str(folder / "prose")
    assert (first.until, second.until) == (1_500, None)
    assert first.planned == {code: pytest.approx(375), prose: pytest.approx(1_125)}
    assert second.planned == {code: pytest.approx(report.tokens - 1_500)}
    assert sum(first.delivered.values()) == pytest.approx(1_500, rel=0.2)
    delivered = sum(tokens for stage in report.stages for tokens in stage.delivered.values())
    assert delivered == pytest.approx(report.tokens)
    page = (whole["adamw"] / "report.html").read_text()
    assert "<h3>Stages of the data</h3>" in page
    assert f"<td class=text>{prose}</td><td>1,125</td><td>75.0%</td>" in page


def test_stages_of_a_run_that_goes_on_with_moved_folders_count_each_token_once(
    whole: dict[str, Path],
    parts: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    mixing = (
        dataclasses.replace(parts["mixing"][0], shards={"code": 1.0, "prose": 3.0}),
        StageSettings(shards="code"),
    )
    config = make_config(Path("code"), tmp_path, **parts | {"mixing": mixing})
    go_on_from(whole["adamw"], 7, config)
    report = Report.of_run(tmp_path)
    assert report
    delivered = sum(tokens for stage in report.stages for tokens in stage.delivered.values())
    assert delivered == pytest.approx(report.tokens)
    assert {*report.stages[0].delivered} == {"code", "prose"}


def test_weights_that_stay_keep_their_moments_and_new_ones_begin(whole: dict[str, Path]) -> None:
    moments = part_of(load_state(whole["adamw"], 4), "optimizer.")
    taken = {n.removesuffix(".step"): int(t) for n, t in moments.items() if n.endswith(".step")}
    assert {n for n, steps in taken.items() if steps == 4} == {n for n in taken if "norm" in n}
    assert {n for n, steps in taken.items() if steps == 1} == {n for n in taken if "norm" not in n}


@pytest.mark.parametrize(("name", "stop"), [("adamw", 2), ("muon", 3), ("adamw", 4), ("adamw", 7)])
def test_a_run_goes_on_bit_for_bit_before_at_and_behind_the_end_of_a_phase(
    name: str,
    stop: int,
    folder: Path,
    parts: dict[str, Any],
    whole: dict[str, Path],
    tmp_path: Path,
) -> None:
    config = make_config(folder / "code", tmp_path, **parts, optimizer=name)
    go_on_from(whole[name], stop, config)
    assert_same_run(whole[name], tmp_path, sum(STEPS))


def test_a_run_of_equal_phases_is_a_run_without(folder: Path, tmp_path: Path) -> None:
    """Nothing happens between two phases that does not happen between two steps."""
    parts = tuple(PhaseSettings(steps=n, schedule="constant", warmup_steps=0) for n in STEPS)
    run(config_of(folder / "code", tmp_path / "phases", parts))
    plain = {"schedule": "constant", "warmup_steps": 0, "steps": sum(STEPS)}
    run(make_config(folder / "code", tmp_path / "plain", **plain))
    assert_same_run(tmp_path / "plain", tmp_path / "phases", sum(STEPS))


counts = st.lists(st.integers(1, 30), min_size=1, max_size=5)


@given(counts, st.integers(0, 8))
def test_rates_are_those_of_runs_as_long_as_the_phases(lengths: list[int], warmup: int) -> None:
    parts = tuple(
        PhaseSettings(steps=steps, learning_rate=1.0 + n, schedule="linear", warmup_steps=warmup)
        for n, steps in enumerate(lengths)
    )
    found = phases_of(TrainConfig(shards="out", phases=parts, steps=sum(lengths)))
    rates = [phase_at(found, step).rate(step) for step in range(1, sum(lengths) + 1)]
    assert rates == [
        learning_rate(step, schedule="linear", peak=1.0 + n, steps=steps, warmup_steps=warmup)
        for n, steps in enumerate(lengths)
        for step in range(1, steps + 1)
    ]


def test_a_run_whose_mixing_was_edited_equals_a_run_of_the_final_mixing(
    folder: Path, tmp_path: Path
) -> None:
    code, prose = str(folder / "code"), str(folder / "prose")
    first = StageSettings(shards={code: 1.0, prose: 3.0}, until_tokens=4_000)
    planned = (first, StageSettings(shards=code))
    edited = (
        first,
        StageSettings(shards={code: 1.0}, to={prose: 1.0}, until_tokens=24_000),
        StageSettings(shards=prose),
    )
    even = {"schedule": "constant", "warmup_steps": 0, "save_every": 5, "eval_every": 5}

    def config(name: str, steps: int, mixing: tuple[StageSettings, ...], **more: Any) -> Any:
        settings = {**even, "steps": steps, "mixing": mixing, **more}
        return make_config(folder / "code", tmp_path / name, **settings)

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
    folder: Path, tmp_path: Path
) -> None:
    code = str(folder / "code")
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
    staged = dataclasses.replace(plain, mixing=(dataclasses.replace(mixing[0], targets="last"),))
    assert [stage.targets for stage in training_source(staged)] == ["last"]  # type: ignore[union-attr]


def test_mixing_that_contradicts_itself_is_refused(folder: Path, tmp_path: Path) -> None:
    code = str(folder / "code")
    ending, endless = StageSettings(shards=code, until_tokens=9_000), StageSettings(shards=code)
    longer, uneven = (StageSettings(shards=code, sequence_length=n) for n in (64, 24))
    for settings, message in (
        ({"mixing": (ending,)}, "`mixing`: the last stage goes on until the last step"),
        ({"mixing": (endless, endless)}, "stage 1 has no end"),
        ({"mixing": (longer,)}, "`mixing`: a stage has sequence_length 64, but the run has 32"),
        ({"mixing": (longer,), "step_rows": 8}, "needs steps of a number of tokens"),
        ({"mixing": (uneven,)}, "a stage has sequence_length 24, which does not divide --micro-"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(make_config(folder / "code", tmp_path, **settings))


def test_the_log_says_which_phase_begins_and_what_it_trains(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(config_of(folder / "code", tmp_path, phases(), log_every=100))
    found = re.findall(r"phase (\d) of 3, until step (\d+): trains ([\d,]+) of ", caplog.text)
    assert [(int(n), int(last)) for n, last, _ in found] == [(1, 3), (2, 7), (3, 10)]
    assert len({trained for _, _, trained in found}) == 3


def test_a_file_says_phases_and_their_steps_are_the_run_s(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    listed = [
        {"trainable": "norm", "steps": 3, "learning-rate": "1e-2"},
        {"steps": 4, "schedule": "linear"},
    ]
    file.write_text(yaml.safe_dump({"shards": str(folder / "code"), "phases": listed}))
    monkeypatch.setattr(sys, "argv", ["train", "--config", str(file), "--run-dir", str(tmp_path)])
    config = parse_config()
    assert config.steps == 7
    assert config.phases == (
        PhaseSettings(steps=3, trainable="norm", learning_rate=1e-2),
        PhaseSettings(steps=4, schedule="linear"),
    )
    config.write()
    begun = TrainConfig.of_run(tmp_path)
    assert begun is not None
    assert begun.phases == config.phases


def test_a_file_may_remove_all_skipped_rows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    for skip in ({str(folder / "code"): [[1, 3]]}, {}):
        file.write_text(yaml.safe_dump({"shards": str(folder / "code"), "skip": skip}))
        command = ["train", "--config", str(file), "--run-dir", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", command)
        config = parse_config()
        config.write()
        begun = TrainConfig.of_run(tmp_path)
        assert begun is not None
        assert begun.skip == config.skip == dict.fromkeys(skip, ((1, 3),))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "phases: [{steps: 3, learning_rat: 1}]",
            "phases 1: unknown setting learning_rat\\b.*learning_rate",
        ),
        ("phases: [{trainable: norm}]", "phases 1: has no steps"),
        ("phases: [{steps: 3}, {steps: 0}]", "phases 2: steps: expected a whole number of at"),
        ("phases: [3]", "phases 1: expected settings"),
        ("phases: 3", "phases: expected a list of settings, got 3"),
        ("{phases: [{steps: 3}], steps: 4}", "`--steps`: expected 3, the steps of all phases"),
        ("{phases: [{steps: 3}], epochs: 4}", "`--epochs`"),
        ("phases: [{steps: 3, trainable: '('}]", "invalid regular expression"),
        ("phases: [{steps: 3, shards: a}]", "phases 1: unknown setting shards"),
    ],
)
def test_phases_that_cannot_be_are_refused_in_one_line(
    content: str, words: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(content)
    argv = ["train", "--shards", str(folder / "code"), "--config", str(tmp_path / "run.yaml")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(ConfigError, match=words) as caught:
        parse_config().check()
    assert "\n" not in str(caught.value)


def test_what_a_later_part_cannot_do_is_found_at_the_start(folder: Path, tmp_path: Path) -> None:
    later = phases({}, {}, {"trainable": "nothing_like"})
    first = StageSettings(shards=str(folder / "code"), until_tokens=1_500)
    other_task = (first, StageSettings(shards=str(folder / "classes")))
    cases: list[tuple[dict[str, Any], str]]
    cases = [({"phases": later}, "nearest are"), ({"mixing": other_task}, "one task")]
    for changes, words in cases:
        with pytest.raises(ConfigError, match=words):
            run(make_config(folder / "code", tmp_path, steps=sum(STEPS), **changes))
        assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_a_plan_counts_what_each_phase_trains(folder: Path, tmp_path: Path) -> None:
    planned = dry_run(config_of(folder / "code", tmp_path, phases()), None)
    assert planned.trained_parameters[2] == planned.parameters
    assert planned.trained_parameters[0] < planned.trained_parameters[1] < planned.parameters
    assert "M are trained" in planned.summary()
    assert planned.steps == sum(STEPS)
    whole = dry_run(make_config(folder / "code", tmp_path, steps=sum(STEPS)), None)
    assert planned.peak_gib == whole.peak_gib
