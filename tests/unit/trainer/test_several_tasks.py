"""Runs on data sets of several tasks: one body, a head for each, and every step one task's."""

import dataclasses
import json
import math
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import random_rows, write_rows
from training import (
    VOCABULARY,
    assert_same_run,
    load_state,
    load_weights,
    make_config,
    read_metrics,
    run,
    word_tokenizer,
    write_every_task,
    write_labelled,
)

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.feeding.stats import Quantiles, RemoteStats
from tokenfeed.pipeline.format.schema import Task, task_columns
from tokenfeed.tools.train_command import parse_config
from tokenfeed.trainer.by_task import config_by_task, shards_by_task, shares_by_task
from tokenfeed.trainer.config import PhaseSettings, TrainConfig
from tokenfeed.trainer.course import Course
from tokenfeed.trainer.dry_run import dry_run
from tokenfeed.trainer.evaluation import metrics_by_task, over_tasks
from tokenfeed.trainer.export import load_exported
from tokenfeed.trainer.feeds import feeds_by_task
from tokenfeed.trainer.learner import Learner
from tokenfeed.trainer.loop import Trainer
from tokenfeed.trainer.models.branched import Branched, weights_of_task
from tokenfeed.trainer.models.transformer import Transformer
from tokenfeed.trainer.page.page import write_page
from tokenfeed.trainer.precision import Precision
from tokenfeed.trainer.tasks.registry import learnt_by

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of each task; `train` is a second one of tags, `other` has another tokenizer."""
    folder = write_every_task(tmp_path_factory.mktemp("data"))
    write_labelled(folder / "train", "tag", count=60)
    write_labelled(folder / "again" / "tag", "lm", count=30)
    rows = {"train": random_rows(torch.full((9,), 5).numpy(), "lm", vocabulary_size=32)}
    write_rows(folder / "other", rows, 32, tokenizer=b"{}")
    return folder


def weights(data: Path, **shares: float) -> dict[str, float]:
    return {str(data / name.replace("__", "/")): share for name, share in shares.items()}


def config_of(data: Path, folder: Path, **changes: Any) -> TrainConfig:
    shards = weights(data, **changes.pop("shares", {"classify": 0.5, "tag": 0.3, "lm": 0.2}))
    settings: dict[str, Any] = {"model": "training:branched_model", "steps": 10} | changes
    return make_config(shards, folder, **settings)


def test_data_sets_are_told_apart_by_task_columns_and_labels(data: Path) -> None:
    shards = weights(data, classify=1, tag=2, pairs=3, train=4)
    assert shards_by_task(shards) == {
        "classify": str(data / "classify"),
        "tag+train": weights(data, tag=2, train=4),
        "pairs": str(data / "pairs"),
    }
    assert shares_by_task(shards) == {"classify": 0.1, "tag+train": 0.6, "pairs": 0.3}
    most = weights(data, classify=1e308, tag=1e308, lm=1e308)
    assert shares_by_task(most) == dict.fromkeys(("classify", "tag", "lm"), 1 / 3)
    alone = weights(data, tag=2, train=4)
    assert shards_by_task(alone) == {"": alone}
    assert shards_by_task(str(data / "tag")) == {"": str(data / "tag")}


def test_a_step_moves_the_body_and_its_own_head_and_no_other(data: Path, tmp_path: Path) -> None:
    config = config_of(data, tmp_path, weight_decay=0.5)
    learner, course = learner_and_course(config)
    seen = Counter[str]()
    for step in range(1, 13):
        lesson = course.lesson(step)
        before = {name: w.detach().clone() for name, w in learner.model.named_parameters()}
        take_step(learner, lesson, step)
        own = {name for name, _ in weights_of_task(learner.model, lesson.name)}
        for name, weight in learner.model.named_parameters():
            assert torch.equal(weight, before[name]) == (name not in own), name
        seen[lesson.name] += 1
    course.close()
    assert min(seen.values()) >= 2


def test_a_head_without_a_step_gets_no_gradient_also_where_ranks_add_up(
    data: Path, tmp_path: Path
) -> None:
    config = config_of(data, tmp_path)
    learner, course = learner_and_course(config)
    lesson = course.lesson(1)
    add_gradients(learner, lesson, 1)
    learner.gradients(lesson.name)  # as each rank does before the sum
    course.close()
    own = {name for name, _ in weights_of_task(learner.model, lesson.name)}
    got = {name for name, w in learner.model.named_parameters() if w.grad is not None}
    assert got == own
    others = {name for name, _ in learner.model.named_parameters()} - own
    assert others
    assert all(name.startswith("heads.") for name in others)


def learner_and_course(config: TrainConfig) -> tuple[Learner, Course]:
    task, precision = learnt_by(config, CPU), Precision("fp32", CPU)
    learner = Learner(config, task, precision, CPU)
    feeds = feeds_by_task(config, task, CPU, torch.float32)
    return learner, Course(config, feeds, learner)


def add_gradients(learner: Learner, lesson: Any, step: int) -> torch.Tensor:
    targets, ends = torch.zeros((), dtype=torch.int64), False
    while not ends:
        batch, part, ends = next(lesson.feed)
        shown = learner.task.prepare(lesson.shape(batch), part)
        targets = targets + learner.add_gradients(shown).targets
    return targets


def take_step(learner: Learner, lesson: Any, step: int) -> None:
    learner.step(step, add_gradients(learner, lesson, step))


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop", [3, *(pytest.param(stop, marks=pytest.mark.long) for stop in (1, 4, 7))]
)
def test_a_run_resumes_bit_for_bit_at_any_step(stop: int, data: Path, tmp_path: Path) -> None:
    for name, after in (("whole", None), ("parts", stop)):
        run(config_of(data, tmp_path / name), stop_after=after)
    run(config_of(data, tmp_path / "parts", resume=True))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 10)
    for task in ("classify", "tag", "lm"):
        for key in (f"loss/{task}", f"validation_loss/{task}"):
            found = read_metrics(tmp_path / "whole", key)
            assert found
            assert found == read_metrics(tmp_path / "parts", key)


def test_steps_are_in_proportion_and_each_is_told_as_its_tasks(data: Path, tmp_path: Path) -> None:
    run(config_of(data, tmp_path, steps=20, eval_every=20, save_every=20))
    steps = {task: read_metrics(tmp_path, f"loss/{task}") for task in ("classify", "tag", "lm")}
    assert sorted(step for found in steps.values() for step in found) == list(range(1, 21))
    for task, share in (("classify", 0.5), ("tag", 0.3), ("lm", 0.2)):
        assert abs(len(steps[task]) - 20 * share) < 2


def test_metrics_are_under_the_tasks_names(data: Path, tmp_path: Path) -> None:
    report = run(config_of(data, tmp_path))
    metrics = json.loads((tmp_path / "report.json").read_text())["metrics"]
    assert metrics == report.metrics
    assert metrics.keys() == {"classify", "tag", "lm"}
    for task, score in (("classify", "macro_f1"), ("tag", "span_f1"), ("lm", "perplexity")):
        assert metrics[task].keys() == {"validation", "test"}
        assert {"loss", score} <= metrics[task]["test"].keys()
    assert report.loss_first is None
    assert report.losses.keys() == metrics.keys()
    assert report.task == "classify:classify tag:tag lm:lm"
    assert "classify test, best at step" in report.summary()
    write_page(tmp_path)
    assert "macro f1, classify test" in (tmp_path / "report.html").read_text()


def test_the_best_has_the_least_left_in_the_mean_of_what_tasks_lack(
    data: Path, tmp_path: Path
) -> None:
    report = run(config_of(data, tmp_path, steps=12, keep=9))
    lacks = {
        task: {step: 1 - score for step, score in read_metrics(tmp_path, key).items()}
        for task, key in (
            ("classify", "validation_macro_f1/classify"),
            ("tag", "validation_span_f1/tag"),
        )
    } | {"lm": read_metrics(tmp_path, "validation_loss/lm")}
    overall = read_metrics(tmp_path, "validation_left")
    assert overall[0] == 1.0
    for step in overall:
        left = [found[step] / found[0] for found in lacks.values()]
        assert overall[step] == pytest.approx(sum(left) / 3)
    assert report.best_step == min((4, 8, 12), key=overall.__getitem__)


def test_metrics_made_one_come_apart_again() -> None:
    found = {"a": {"loss": 2.0, "loss/x": 1.0}, "b": {"loss": 3.0, "accuracy": 0.5}, "c": {}}
    together = over_tasks(found, {"a": 0.5, "b": 1.0})
    assert together["left"] == 0.75
    assert together["loss/a/x"] == 1.0
    assert metrics_by_task(together, found) == found
    assert "left" not in over_tasks(found, {})


@pytest.mark.slow
def test_phases_choose_among_the_tasks_and_resume(data: Path, tmp_path: Path) -> None:
    phases = (
        PhaseSettings(steps=4, shards=str(data / "lm")),
        PhaseSettings(steps=4, trainable="heads", shards=weights(data, classify=1, tag=1)),
        PhaseSettings(steps=2),
    )
    for name, after in (("whole", None), ("parts", 6)):
        run(config_of(data, tmp_path / name, phases=phases, keep=9), stop_after=after)
    run(config_of(data, tmp_path / "parts", phases=phases, resume=True))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 10)
    assert set(read_metrics(tmp_path / "whole", "loss/lm")) >= {1, 2, 3, 4}
    early, late = (load_weights(tmp_path / "whole", step) for step in (4, 8))
    for name in early:
        assert torch.equal(early[name], late[name]) == (not name.startswith("heads."))


def test_a_checkpoint_of_other_tasks_is_refused(data: Path, tmp_path: Path) -> None:
    run(config_of(data, tmp_path, steps=2))
    fewer = {"classify": 1, "tag": 1}
    with pytest.raises(ResumeError, match="the checkpoint has task classify:classify tag:tag lm"):
        run(config_of(data, tmp_path, shares=fewer, steps=4, resume=True))
    again = config_of(data, tmp_path, shares={"classify": 1, "tag": 8, "lm": 1}, steps=4)
    assert run(dataclasses.replace(again, resume=True)).finished


def test_one_task_is_saved_as_before(data: Path, tmp_path: Path) -> None:
    run(make_config(data / "tag", tmp_path, steps=1))
    path = tmp_path / "checkpoints" / "step-00000001" / "checkpoint.json"
    meta = json.loads(path.read_text())["meta"]
    assert meta["task"] == "tag"
    assert "tasks" not in meta["loader"]
    assert "classify" not in meta["loader"]
    assert not any(name.startswith("heads.") for name in load_weights(tmp_path, 1))


@pytest.mark.parametrize(
    ("shares", "changes", "message"),
    [
        ({"classify": 1, "other": 1}, {}, "several tasks need one tokenizer"),
        ({"tag": 1, "again__tag": 1}, {}, "cannot be called `tag`"),
        ({"classify": math.inf, "tag": 1}, {}, "must be a number above 0"),
        ({"classify": 1e12, "tag": 1}, {}, "no weight may be more than"),
        ({"classify": 1, "lm": 1}, {"objective": "masked"}, "masked learns from documents"),
        ({"classify": 1, "lm": 1}, {"model": "hf:any"}, "has one head"),
        ({"classify": 1, "lm": 1}, {"batching": "packed"}, "rows with one label"),
        ({"classify": 1, "tag": 1}, {"trainable": "heads.tag"}, "no weight that classify uses"),
        ({"classify": 1, "tag": 1}, {"export": Path("out")}, "only built-in models"),
        (
            {"classify": 1, "tag": 1},
            {"phases": (PhaseSettings(steps=2, shards="lm"),), "steps": 2},
            "of a task that none of --shards has",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    shares: dict[str, float], changes: Any, message: str, data: Path, tmp_path: Path
) -> None:
    for phase in changes.get("phases", ()):
        changes = changes | {"phases": (dataclasses.replace(phase, shards=str(data / "lm")),)}
    with pytest.raises(ConfigError, match=message) as caught:
        run(config_of(data, tmp_path / "run", shares=shares, **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_task_may_be_called_like_a_method(data: Path, tmp_path: Path) -> None:
    run(config_of(data, tmp_path, shares={"train": 1, "lm": 1}, steps=2))
    assert "heads.train.head.weight" in load_weights(tmp_path, 2)


def test_each_head_is_exported_with_the_body_and_can_be_begun_from(
    data: Path, tmp_path: Path
) -> None:
    config = config_of(data, tmp_path / "run", model="bag", export=tmp_path / "out", steps=3)
    run(config)
    run(config)  # schedulers start commands twice
    state = load_weights(tmp_path / "run", 3)
    for task in ("classify", "tag", "lm"):
        model = load_exported(tmp_path / "out" / task)
        assert isinstance(model, Transformer)
        assert not isinstance(model, Branched)
        assert torch.equal(model.embedding.weight, state["embedding.weight"])
    tags = load_exported(tmp_path / "out" / "tag").head
    assert tags is not None
    assert torch.equal(tags.weight, state["heads.tag.head.weight"])
    begun = {"model": "bag", "steps": 1, "learning_rate": 1e-9}
    one = make_config(
        data / "tag", tmp_path / "one", init_from=str(tmp_path / "out" / "tag"), **begun
    )
    run(one)
    torch.testing.assert_close(load_weights(tmp_path / "one", 1)["head.weight"], tags.weight)
    for source in ("run", "out"):
        all_again = config_of(
            data, tmp_path / f"{source}2", init_from=str(tmp_path / source), **begun
        )
        run(all_again)
        again = load_weights(tmp_path / f"{source}2", 1)
        assert all(torch.allclose(again[name], state[name], atol=1e-6) for name in state)


@pytest.mark.slow
def test_a_dry_run_tells_each_task(data: Path, tmp_path: Path) -> None:
    config = config_of(data, tmp_path, model="bag", steps=100)
    found = dry_run(config, None)
    assert found.tasks.keys() == {"classify", "tag", "lm"}
    assert found.tasks["classify"]["steps"] == pytest.approx(50)
    assert found.epochs == min(task["epochs"] for task in found.tasks.values())
    assert "classify: 50 steps" in found.summary()
    assert found.trained_parameters == [found.parameters]


@pytest.mark.slow
def test_a_dry_run_counts_the_steps_that_phases_give_a_task(data: Path, tmp_path: Path) -> None:
    phases = (
        PhaseSettings(steps=60, shards=str(data / "lm")),
        PhaseSettings(steps=20, shards=weights(data, classify=3, tag=1)),
        PhaseSettings(steps=20),
    )
    found = dry_run(config_of(data, tmp_path, model="bag", steps=100, phases=phases), None)
    steps = {name: task["steps"] for name, task in found.tasks.items()}
    assert steps == pytest.approx({"classify": 15 + 10, "tag": 5 + 6, "lm": 60 + 4})


@pytest.mark.long
def test_headspace_knows_every_task(data: Path, tmp_path: Path) -> None:
    report = run(config_of(data, tmp_path, headspace=2, steps=8))
    assert report.headspace_tokens_per_s


def test_settings_of_a_task_have_its_own_data_also_in_phases(data: Path, tmp_path: Path) -> None:
    phases = (PhaseSettings(steps=4, shards=str(data / "lm")), PhaseSettings(steps=6))
    found = config_by_task(config_of(data, tmp_path, phases=phases))
    assert found["lm"].shards == str(data / "lm")
    assert [phase.shards for phase in found["lm"].phases] == [str(data / "lm")] * 2
    assert found["tag"].phases[0].shards is None


def test_a_state_that_lacks_a_task_is_refused(data: Path, tmp_path: Path) -> None:
    trainer = Trainer(config_of(data, tmp_path))
    state = trainer.course.state_dict()
    assert state.keys() == {"classify", "tag", "lm"}
    with pytest.raises(ResumeError, match="the checkpoint's data is of the tasks classify, tag"):
        trainer.course.load_state_dict({name: state[name] for name in ("classify", "tag")})
    trainer.close()


def test_moments_of_a_head_are_its_own_steps(data: Path, tmp_path: Path) -> None:
    run(config_of(data, tmp_path, steps=10))
    turns = {task: len(read_metrics(tmp_path, f"loss/{task}")) for task in ("classify", "tag")}
    kept = {
        name: values
        for group in load_state(tmp_path, 10)["optimizer"]["weights"]
        for name, values in group.items()
    }
    for task, steps in turns.items():
        assert int(kept[f"heads.{task}.head.weight"]["step"]) == steps
    assert int(kept["embedding.weight"]["step"]) == 10


def test_settings_suit_all_tasks_and_each_has_its_epochs(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = weights(data, classify=0.75, tag=0.25)
    words = [f"{path}={share}" for path, share in shards.items()]

    def parsed(*words: object) -> TrainConfig:
        monkeypatch.setattr(sys, "argv", ["train", "--shards", *map(str, words)])
        return parse_config()

    both = parsed(*words)
    alone = [parsed(path) for path in shards]
    both.check()
    assert both.model == "shallow"
    assert both.sequence_length == max(config.sequence_length for config in alone)
    assert both.step_rows == max(config.step_rows or 0 for config in alone)
    assert both.steps == math.ceil(max(alone[0].steps / 0.75, alone[1].steps / 0.25))
    assert parsed(*words, "--epochs", 2).steps == 40
    assert parsed(*words, f"{data / 'lm'}=0.5").model == "tiny"


def test_what_loaders_took_of_stores_is_added_up_and_of_waits_the_worse_is_told(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = [
        RemoteStats(1, 20, 0, 0.5, 3, 0, Quantiles(1, 5, 6, 7)),
        None,
        RemoteStats(2, 30, 1, 0.0, 4, 1, Quantiles(2, 3, 4, 9)),
    ]
    trainer = Trainer(config_of(data, tmp_path))
    assert trainer.course.remote is None
    stats = iter([SimpleNamespace(remote=each) for each in took])
    monkeypatch.setattr(ShardLoader, "stats", lambda _: next(stats))
    found = trainer.course.remote
    trainer.close()
    assert found == RemoteStats(3, 50, 1, 0.5, 7, 1, Quantiles(2, 5, 6, 9))


def write_learnable(folder: Path, name: Task, seed: int) -> Path:
    """Rows whose labels follow from their ids: a class from their mean, a tag from each."""
    splits = {}
    for nth, (split, count) in enumerate((("train", 600), ("validation", 150), ("test", 150))):
        lengths = np.random.default_rng((seed, nth)).integers(6, 20, count)
        rows = random_rows(lengths, name, vocabulary_size=VOCABULARY)
        first = np.cumsum(lengths) - lengths
        mean = np.add.reduceat(rows.ids.astype(np.int64), first) / lengths
        labels = rows.ids % 5 if name == "tag" else mean > VOCABULARY / 2
        columns = rows.per_token if name == "tag" else rows.per_row
        column = task_columns(name)[0]
        columns[column.name] = labels.astype(column.dtype)
        splits[split] = rows
    names = {"tag": ("O", "B-A", "I-A", "B-B", "I-B"), "classify": ("low", "high")}
    return write_rows(
        folder,
        splits,
        VOCABULARY,
        task=name,
        label_names=names[name],
        tokenizer=word_tokenizer(),
    )


@pytest.mark.slow
@pytest.mark.long
def test_two_tasks_are_learnt_far_beyond_guessing_the_majority(tmp_path: Path) -> None:
    shards = {
        str(write_learnable(tmp_path / name, name, seed)): 0.5
        for seed, name in enumerate(("classify", "tag"))
    }
    settings = {"steps": 300, "micro_batch_tokens": 512, "step_tokens": 512, "eval_every": 200}
    config = make_config(shards, tmp_path / "run", model="shallow", **settings, log_every=50)
    metrics = run(config).metrics
    for name in ("classify", "tag"):
        found = metrics[name]["test"]
        assert found["accuracy"] > 0.9 > found["majority_accuracy"] + 0.25
