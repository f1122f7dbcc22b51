"""Training end to end, on a corpus small enough to be learnt in seconds."""

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.data_sets import random_rows, write_rows
from support.training import (
    VOCABULARY,
    assert_same_run,
    counting_rows,
    go_on_from,
    load_weights,
    make_config,
    parsed,
    read_metrics,
    run,
    write_counting,
    write_labelled,
)

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.loop.evaluation import Evaluator
from tokenfeed.trainer.loop.run import train
from tokenfeed.trainer.loop.trainer import Trainer
from tokenfeed.trainer.report.progress_lines import divergence, notes_on
from tokenfeed.trainer.tasks.registry import make_task

MakeShards = Callable[..., Path]


@pytest.fixture(scope="module")
def make_shards(write_dataset: Callable[..., Path]) -> MakeShards:
    return functools.partial(write_counting, write_dataset)


@pytest.fixture(scope="module")
def finished(counting: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    run(make_config(counting, run_dir))
    return run_dir


def test_a_run_leaves_config_metrics_checkpoints_and_report(finished: Path) -> None:
    assert sorted(path.name for path in finished.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "report.html",
        "report.json",
    ]
    assert yaml.safe_load((finished / "config.yaml").read_text())["step_tokens"] == 256
    assert list(read_metrics(finished, "loss")) == list(range(1, 9))
    assert list(read_metrics(finished, "validation_loss")) == [0, 4, 8]
    checkpoints = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert checkpoints == ["step-00000004", "step-00000008"]


def test_evaluation_changes_nothing(counting: Path, finished: Path, tmp_path: Path) -> None:
    run(make_config(counting, tmp_path / "run", eval_every=1, eval_tokens=256))
    assert read_metrics(tmp_path / "run", "loss") == read_metrics(finished, "loss")


def test_evaluation_of_some_tokens_repeats_its_rows(counting: Path, tmp_path: Path) -> None:
    config = make_config(counting, tmp_path / "run", eval_tokens=500)
    with contextlib.closing(Trainer(config)) as trainer:
        once, again = (trainer.evaluator.metrics_of("validation") for _ in range(2))
        whole = dataclasses.replace(config, eval_tokens=10**9)
        with contextlib.closing(Trainer(whole)) as other:
            assert once == again != other.evaluator.metrics_of("validation")


def test_run_that_goes_on_in_fp32_reports_no_loss_scale(counting: Path, tmp_path: Path) -> None:
    begun = run(make_config(counting, tmp_path / "run", precision="fp16", steps=1))
    report = run(make_config(counting, tmp_path / "run", resume=True, steps=2))
    assert (begun.loss_scale, report.loss_scale) == (65536, None)


def test_stop_during_first_evaluation_ends_before_training(
    counting: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    report = train(make_config(counting, tmp_path / "run"), lambda: True)
    assert (report.finished, report.steps, report.tokens) == (False, 0, 0)
    assert "start it again without --resume" in report.summary()
    assert "the evaluation of validation was stopped" in caplog.text
    assert read_metrics(tmp_path / "run", "validation_loss") == {}


def test_stop_during_test_evaluation_is_made_up_on_resume(tmp_path: Path) -> None:
    shards = write_labelled(tmp_path / "shards", "classify")
    config = make_config(shards, tmp_path / "run", steps=4, eval_every=100)
    report = run(config, stop_after=4)
    assert (report.finished, report.steps) == (False, 4)
    assert "test" not in report.metrics
    report = run(dataclasses.replace(config, resume=True))
    assert report.finished
    assert "accuracy" in report.metrics["test"]


def test_stop_during_last_validation_is_made_up_on_resume(
    counting: Path, finished: Path, tmp_path: Path
) -> None:
    config = make_config(counting, tmp_path / "run")
    report = run(config, stop_after=config.steps)
    assert (report.finished, report.steps) == (False, config.steps)
    assert config.steps not in read_metrics(tmp_path / "run", "validation_loss")
    assert run(dataclasses.replace(config, resume=True)).finished
    assert_same_run(tmp_path / "run", finished, config.steps)


def test_resume_evaluates_only_when_due(
    counting: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, evaluated = Evaluator.metrics_of, []

    def count(evaluator: Evaluator, split: str) -> dict[str, float]:
        evaluated.append(split)
        return plain(evaluator, split)

    report = run(make_config(counting, tmp_path / "run"), stop_after=3)
    assert (report.finished, report.steps) == (False, 3)
    assert "go on with --resume" in report.summary()
    monkeypatch.setattr(Evaluator, "metrics_of", count)
    run(make_config(counting, tmp_path / "run", resume=True), stop_after=4)
    run(make_config(counting, tmp_path / "run", resume=True))
    assert evaluated == ["validation", "validation"]  # at steps 4 and 8
    assert_same_run(tmp_path / "run", finished, 8)


def test_run_says_that_its_warm_up_does_not_end(
    counting: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(make_config(counting, tmp_path / "whole", steps=8, warmup_steps=8), lambda: True)
    assert "warmup" not in caplog.text
    train(make_config(counting, tmp_path / "cut", steps=8, warmup_steps=9), lambda: True)
    assert "rises for --warmup-steps 9, so this run ends before" in caplog.text


def test_long_completions_keep_their_prompts_and_lose_their_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = np.full(60, 100, np.int64)
    rows = random_rows(lengths, "complete", vocabulary_size=64)
    rows.per_row["prompt_length"][:] = 10
    shards = write_rows(tmp_path / "shards", {"train": rows}, 64, task="complete")
    for batching in ("packed", "padded"):
        config = make_config(shards, tmp_path / batching, steps=1, batching=batching)
        with contextlib.closing(Trainer(config)) as trainer:
            batch = next(iter(trainer.loader))
        assert not batch.starts.any()
        assert batch.num_targets == len(batch.rows) * (32 - 10)
    run(make_config(shards, tmp_path / "run", steps=1))
    assert "lose their end: about 4,080 tokens, 68.0 %" in caplog.text


def test_finished_report_notes_scores_below_a_constant_answer(tmp_path: Path) -> None:
    shards = write_labelled(tmp_path / "shards", "score", count=60)
    config = make_config(
        shards, tmp_path / "run", learning_rate=1e-12, steps=8, micro_batch_tokens=256
    )
    report = run(config)
    scores = report.metrics["test"]
    assert (scores["rmse"], scores["mean_rmse"]) != (None, None)
    is_worse = scores["rmse"] >= scores["mean_rmse"]  # type: ignore[operator]
    assert is_worse == any("test: rmse" in note for note in report.notes)
    assert is_worse
    assert "no better than" in report.summary()


BAD_SETTINGS = [
    ({"steps": 0}, r"`--steps`: expected a whole number of at least 1, got 0\."),
    (
        {"micro_batch_tokens": 100, "step_tokens": 100},
        r"multiple of --sequence-length=32, got 100\. Try 96\.",
    ),
    ({"step_tokens": 300}, r"multiple of --micro-batch-tokens=128, got 300\. Try 256\."),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SETTINGS)
def test_a_setting_that_cannot_work_is_named_with_its_value(
    changes: dict[str, Any], message: str, counting: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(make_config(counting, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_resume_takes_the_settings_the_run_was_begun_with(
    counting: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = make_config(counting, tmp_path / "run", seed=5)
    run(begun)
    caplog.set_level("INFO")
    resumed = parsed("--resume", "--run-dir", begun.run_dir, "--steps", 12)
    assert resumed == dataclasses.replace(begun, resume=True, steps=12)
    with pytest.raises(ResumeError):
        run(dataclasses.replace(resumed, optimizer="muon"))
    assert "from now on" not in caplog.text
    run(resumed)
    assert "steps was 8, is 12 from now on" in caplog.text


def test_resume_uses_new_settings_of_adamw(counting: Path, finished: Path, tmp_path: Path) -> None:
    cases = {"beta1": 0.0, "beta2": 0.0, "epsilon": 1e3, "weight_decay": 50.0}
    for folder in ("same", *cases):
        changes: dict[str, Any] = {name: cases[name] for name in cases if name == folder}
        go_on_from(finished, 8, make_config(counting, tmp_path / folder, steps=9, **changes))
    same = load_weights(tmp_path / "same", 9)
    decays = {each for each, weight in same.items() if weight.dim() == 2}
    for name in cases:
        other = load_weights(tmp_path / name, 9)
        changed = {each for each in same if not torch.equal(same[each], other[each])}
        assert changed == (decays if name == "weight_decay" else same.keys()), name


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: [1")
    with pytest.raises(ConfigError, match=r"invalid YAML .* is not the config\.yaml of a run"):
        parsed("--resume", "--run-dir", tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "mini"},
            "--model support.training:small_model, this run has mini",
        ),
        ({"optimizer": "muon"}, "the checkpoint has --optimizer adamw, this run has muon"),
        ({"seed": 1}, "seed=0, this loader has seed=1"),
        ({"sequence_length": 64}, "sequence_length=32.*sequence_length=64"),
    ],
)
def test_resuming_another_run_says_what_differs(
    changes: dict[str, Any], message: str, counting: Path, finished: Path
) -> None:
    with pytest.raises(ResumeError, match=message):
        run(make_config(counting, finished, resume=True, steps=10, **changes))


def test_resuming_on_other_shards_is_refused(
    finished: Path, tmp_path: Path, make_shards: MakeShards
) -> None:
    others = make_shards(tmp_path / "shards", rows=50)
    with pytest.raises(ResumeError, match="cannot resume"):
        run(make_config(others, finished, resume=True, steps=10))


def test_resuming_past_the_end_asks_for_more_steps(counting: Path, finished: Path) -> None:
    with pytest.raises(ConfigError, match=r"`--steps`=7: .* has trained 8 steps already"):
        run(make_config(counting, finished, resume=True, steps=7))


@pytest.mark.parametrize(
    ("task", "message"),
    [("classify", "has no labels"), ("rank", "unknown task rank, expected one of lm, complete")],
)
def test_shards_that_nothing_can_be_learnt_of_are_refused(
    tmp_path: Path, make_shards: MakeShards, task: str, message: str
) -> None:
    folder = make_shards(tmp_path / "shards")
    manifest = Manifest.read(folder)
    dataclasses.replace(manifest, task=task).write(folder)
    with pytest.raises(ConfigError, match=message):
        Trainer(make_config(folder, tmp_path / "run"))


def test_a_validation_split_without_a_target_is_left_out(
    tmp_path: Path, make_shards: MakeShards, write_dataset: Callable[..., Path]
) -> None:
    one = (np.array([3]), np.array([1]))  # a document's first token is no target
    splits = {"train": counting_rows(200), "validation": one, "test": one}
    folder = write_dataset(tmp_path / "shards", splits, VOCABULARY)
    report = run(make_config(folder, tmp_path / "run"))
    assert report.metrics == {}
    assert report.best_step is None


WORSENING = {"learning_rate": 30.0, "schedule": "constant", "warmup_steps": 0}
"""A run whose last step is not its best."""


def test_resume_warns_where_the_best_checkpoint_is_gone(
    counting: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"save_every": 2, "eval_every": 2, "keep": 9} | WORSENING
    best = run(make_config(counting, tmp_path, steps=6, **settings)).best_step
    assert best
    assert best < 6
    lost = tmp_path / "checkpoints" / f"step-{best:08d}"
    shutil.rmtree(lost)
    resumed = run(make_config(counting, tmp_path, steps=8, **settings, resume=True))
    assert f"{lost}: the best checkpoint so far is gone" in caplog.text
    assert resumed.best_step in (6, 8)


def test_patience_counts_evaluations_between_checkpoints(counting: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eval_every": 1, "save_every": 5, "patience": 2}
    report = run(make_config(counting, tmp_path, steps=12, **settings))
    losses = read_metrics(tmp_path, "validation_loss")
    assert all(losses[step] < losses[step - 1] for step in range(1, 13)), "no run that improves"
    assert (report.steps, report.best_step) == (12, 12)


def test_patience_ends_a_run_whose_evaluations_are_never_finite(
    counting: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tokenfeed")
    settings: dict[str, Any] = {"eval_every": 2, "patience": 2, "steps": 12}
    report = run(make_config(counting, tmp_path, model="support.training:lost_model", **settings))
    assert (report.finished, report.steps, report.best_step) == (True, 4, None)
    assert "step 4 | no evaluation had a finite result: the run ends. Lower" in caplog.text
    assert report.notes == [
        "the validation loss is not finite at the end: the run has failed. Lower "
        "`--learning-rate`, raise `--warmup-steps`, or take `--precision fp32`"
    ]


def test_run_whose_last_steps_were_skipped_says_so(make_shards: MakeShards, tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards", validation_rows=0)
    settings: dict[str, Any] = {"steps": 8, "log_every": 2, "learning_rate": 1e30}
    report = run(make_config(shards, tmp_path / "run", warmup_steps=0, **settings))
    assert report.skipped_steps == 7
    assert [note[:35] for note in report.notes] == ["the loss is not finite at the end: "]


def test_best_step_between_checkpoints_is_saved(counting: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eval_every": 1, "save_every": 50, "keep": 1, "steps": 6}
    settings |= WORSENING
    whole, again = tmp_path / "whole", tmp_path / "again"
    report = run(make_config(counting, whole, **settings))
    losses = read_metrics(whole, "validation_loss")
    best = min(range(1, 7), key=losses.__getitem__)
    assert best < 6, "the last step is the best one"
    assert report.best_step == best
    assert report.metrics["validation"]["loss"] == losses[best]
    assert load_weights(whole, best)
    run(make_config(counting, again, **settings), stop_after=best + 1)
    assert run(make_config(counting, again, **settings, resume=True)).best_step == best
    assert_same_run(whole, again, 6)


def test_resume_warns_of_a_learning_rate_that_jumps(
    counting: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(make_config(counting, tmp_path, steps=8))
    run(make_config(counting, tmp_path, steps=16, resume=True))
    rates = read_metrics(tmp_path, "learning_rate")
    assert rates[9] > 5 * rates[8]
    figures = f"jumps from {rates[8]:.2e} in step 8 to {rates[9]:.2e} in step 9"
    assert figures in caplog.text
    assert "--schedule cosine follows --steps" in caplog.text


def test_a_run_without_targets_ends_with_an_error_and_no_export(
    tmp_path: Path, write_dataset: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    ones = (np.arange(300) % VOCABULARY, np.ones(300, np.int64))  # a first token is no target
    folder = write_dataset(tmp_path / "shards", {"train": ones}, VOCABULARY)
    config = make_config(folder, tmp_path / "run", batching="padded", steps=4)
    with pytest.raises(ConfigError, match="no step of the training had a target"):
        run(config)
    assert "1 step up to step 1 had no target to train on" in caplog.text
    with pytest.raises(ConfigError, match="no step of the training had a target"):
        run(dataclasses.replace(config, resume=True))


def test_a_run_whose_steps_are_all_skipped_ends_with_an_error(
    counting: Path, tmp_path: Path
) -> None:
    model = "support.training:overflowing_for_ever"
    with pytest.raises(ConfigError, match="gradients of all 4 steps are not finite, so the model"):
        run(make_config(counting, tmp_path, model=model, steps=4))


def test_run_warns_of_a_validation_split_that_says_little(
    tmp_path: Path, write_dataset: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    for rows in (3, 20):
        shards = write_counting(write_dataset, tmp_path / str(rows), rows=60, validation_rows=rows)
        run(make_config(shards, tmp_path / f"run {rows}", steps=1))
        warned = f"the split validation has only {rows} rows, " in caplog.text
        assert warned == (rows == 3)


@pytest.mark.parametrize(
    ("losses", "is_diverging"),
    [
        ([5.0, 4.0, 3.0, 2.5, 2.4, 2.4], False),
        ([5.0, 4.0, 3.0, 2.5, 2.4, 2.4, 2.3, 2.3, 2.3, 2.9, 3.6, 4.4, 5.1, 5.7], True),
        ([2.0] * 18 + [2.5, 2.6], True),  # above 1.2 times its least
        ([2.0] * 18 + [2.3, 2.3], False),
        ([2.0] * 18 + [4.0, 2.0, 2.0], False),  # a jump that it has left behind
        ([0.1, 0.3] * 10, False),  # noise from line to line
        ([1.0, 9.0], False),  # too few lines
        ([2.5, None, 2.0, 2.0, None, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 8.0], True),
    ],
)
def test_divergence_is_an_end_above_the_least_smoothed_loss(
    losses: list[float | None], is_diverging: bool
) -> None:
    assert any("is diverging" in note for note in divergence(losses)) == is_diverging


def test_finished_report_notes_a_loss_that_still_fell(tmp_path: Path) -> None:
    shards = write_labelled(tmp_path / "shards", "classify")
    config = make_config(shards, tmp_path / "run")
    task = make_task(config, Manifest.read(shards), torch.device("cpu"))
    lines = [{"step": step, "loss": 1 / step} for step in range(1, 21)]
    assert notes_on(task, {}, lines) == ["the loss still fell when the run ended: raise --epochs"]
    flat = [{"step": step, "loss": 1.0} for step in range(1, 21)]
    assert notes_on(task, {}, flat) == []
    risen = [line | {"validation_loss": line["step"]} for line in lines]
    (note,) = notes_on(task, {}, risen)
    assert "ends at 20, after 1: the model learns the training data by heart" in note
