"""Every task: what its gradients depend on, and what they do not."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training import (
    LONGEST,
    make_config,
    run,
    write_labelled,
)
from torch import nn

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import Task
from tokenfeed.pipeline.planning.policies import Batching, Fixed, Packed, Padded
from tokenfeed.trainer.data.micro_batch import MicroBatch, Shaper
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.loop.evaluation import evaluate
from tokenfeed.trainer.models.gpt import ModelSize, Transformer
from tokenfeed.trainer.optim.precision import Precision
from tokenfeed.trainer.report.run_files import Report
from tokenfeed.trainer.tasks import task as tasks
from tokenfeed.trainer.tasks.label_tasks import number_scores
from tokenfeed.trainer.tasks.registry import make_task

CPU = torch.device("cpu")
TASKS: list[Task] = ["lm", "complete", "classify", "score", "tag"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Task, Path]:
    return {name: write_labelled(tmp_path_factory.mktemp(name) / "shards", name) for name in TASKS}


def task_of(folder: Path) -> tasks.Task:
    return make_task(make_config(folder, folder), Manifest.read(folder), CPU)


def model_of(task: tasks.Task) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelSize(layers=2, width=32, heads=2), task.head)


def gradients(
    task: tasks.Task,
    folder: Path,
    batching: Batching,
    ranks: int = 1,
) -> list[torch.Tensor]:
    """Those of one epoch, as the loop weighs them."""
    model = model_of(task).double()
    filled = bool(batching.rows_to_fill(8))
    shape = Shaper(causal=task.head.causal, apart=True, separation="mask", compiled=filled)
    targets = torch.zeros(())
    for rank in range(ranks):
        place = {"rank": rank, "world_size": ranks} if ranks > 1 else {}
        with ShardLoader(folder, batching=batching, epochs=1, num_workers=0, **place) as loader:
            for batch in loader:
                loss = doubled(task, model, shape(batch))
                (loss.sum / 100).backward()  # type: ignore[no-untyped-call]
                targets += loss.targets
    return [(100 / targets) * p.grad for p in model.parameters() if p.grad is not None]


def doubled(task: tasks.Task, model: nn.Module, micro_batch: MicroBatch) -> tasks.Loss:
    """A loss in double precision, so that only what is wrong can differ; nothing is masked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        return task.loss(model, micro_batch)


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert ours
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_row_is_learnt_alike_alone_padded_packed_and_beside_fillers(
    folders: dict[Task, Path], name: Task
) -> None:
    """Fillers are of ranks that have no micro-batch left, and of compiled shapes."""
    task, padded = task_of(folders[name]), Padded(100, multiple_of=8)
    alone = gradients(task, folders[name], Fixed(1))
    assert_equal(gradients(task, folders[name], Padded(LONGEST * 40)), alone)
    assert_equal(gradients(task, folders[name], replace(padded, last="fill")), alone)
    assert_equal(gradients(task, folders[name], padded, ranks=3), alone)
    if name not in ("classify", "score"):
        assert_equal(gradients(task, folders[name], Packed(64, batch_size=3)), alone)


def test_filled_up_packed_batches_are_of_one_shape(folders: dict[Task, Path]) -> None:
    task = task_of(folders["tag"])
    batching = Packed(64, batch_size=3, last="fill")
    unfilled = gradients(task, folders["tag"], Packed(64, batch_size=3))
    assert_equal(gradients(task, folders["tag"], batching), unfilled)
    shape = Shaper(causal=False, apart=True, separation="ends", compiled=True)
    with ShardLoader(folders["tag"], batching=batching, epochs=1, num_workers=0) as loader:
        for batch in loader:
            scope = shape(batch).scope
            assert scope.cu_seqlens is not None
            ends = scope.cu_seqlens
            assert scope.longest is not None
            assert (int(ends[0]), int(ends[-1])) == (0, 3 * 64)
            assert ends.diff().min() > 0
            assert ends.diff().max() == scope.longest.shape[0] <= 64


@pytest.mark.parametrize("task", ["classify", "score"])
def test_rows_with_one_label_are_neither_packed_nor_cut(
    task: Task, folders: dict[Task, Path], tmp_path: Path
) -> None:
    longest = max(split.longest_row for split in Manifest.read(folders[task]).splits.values())
    for changes, words in (
        ({"batching": "packed"}, "`--batching`"),
        ({"sequence_length": 8}, f"`--sequence-length`=8: .* Raise it to {longest}"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(make_config(folders[task], tmp_path / "run", **changes))
        assert not (tmp_path / "run").exists()


def score_in_parts(true: np.ndarray, guess: np.ndarray, parts: int) -> dict[str, float]:
    """Scores of numbers that come in several micro-batches, as a task gathers them."""
    answers = [
        tasks.Answers.of(torch.from_numpy(part[0]), torch.from_numpy(part[1]))
        for part in np.array_split(np.stack((true, guess)).astype(np.float32), parts, axis=1)
    ]
    return number_scores(tasks.Answers(*map(np.concatenate, zip(*answers, strict=True))))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("true", "guess"), [(1 / 3, 0.37), (0.1, 0.1), (1e5, -1e-5), (7.0, 7.0)], ids=str
)
def test_pearson_of_constant_numbers_is_zero(true: float, guess: float, parts: int) -> None:
    found = score_in_parts(np.full(1000, true), np.full(1000, guess), parts)
    error = float(np.float32(guess)) - float(np.float32(true))
    assert found == {"rmse": pytest.approx(abs(error)), "mean_rmse": 0.0, "pearson": 0.0}


@given(
    st.floats(-1e6, 1e6, width=32),
    st.floats(0.25, 100, width=32),
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1), st.booleans()), min_size=3, max_size=30),
)
def test_scores_of_numbers_are_those_of_numpy_without_missing_ones(
    centre: float, scale: float, triples: list[tuple[float, float, bool]]
) -> None:
    """Also of numbers that are close to each other and far from zero."""
    true, guess = (
        np.array([centre + scale * each[side] for each in triples], np.float32) for side in (0, 1)
    )
    missing = np.array([each[2] for each in triples[1:]] + [False])
    found = score_in_parts(np.where(missing, np.nan, true), guess, 3)
    true, guess = (each[~missing].astype(float) - centre for each in (true, guess))
    assert found["rmse"] == pytest.approx(np.sqrt(((guess - true) ** 2).mean()), rel=1e-9)
    assert found["mean_rmse"] == pytest.approx(true.std(), rel=1e-6, abs=1e-9)
    assert -1 <= found["pearson"] <= 1
    if true.std() > 0.01 * scale and guess.std() > 0.01 * scale:
        assert found["pearson"] == pytest.approx(np.corrcoef(true, guess)[0, 1], abs=1e-6)


@pytest.mark.parametrize("task", ["score", "classify", "tag"])
def test_predictions_that_are_nan_are_null_and_never_the_best(
    task: Task, folders: dict[Task, Path], tmp_path: Path
) -> None:
    report = run(make_config(folders[task], tmp_path, model="support.training:lost_model", steps=2))
    assert report.best_step is None
    assert all(math.isnan(value) for value in report.metrics["test"].values() if value is not None)
    for name in ("report.json", "metrics.jsonl"):
        text = (tmp_path / name).read_text()
        assert "NaN" not in text
        assert '_rmse": 0.0' not in text
    written = json.loads((tmp_path / "report.json").read_text())["metrics"]["test"]
    assert set(written.values()) == {None}
    assert "loss nan" in Report.of_run(tmp_path).summary()  # type: ignore[union-attr]


@pytest.mark.parametrize("task", TASKS)
def test_interval_of_a_loss_is_that_of_means_of_rows(folders: dict[Task, Path], task: Task) -> None:
    made, rng = task_of(folders[task]), np.random.default_rng(0)
    model, precision = model_of(made).train(), Precision("fp32", CPU)
    shaper = Shaper(causal=made.head.causal, apart=True, separation="mask")
    alone, together = (
        ShardLoader(folders[task], batching=policy, split="train", num_workers=0)
        for policy in (Fixed(1), Fixed(7))
    )
    with alone, together:
        rows = [
            evaluate(model, made, [shaper(batch)], Precision("fp32", CPU), World(CPU))
            | {"n": batch.num_targets}
            for batch in alone
            if batch.num_targets
        ]
        found = evaluate(model, made, map(shaper, together), precision, World(CPU))
    targets = np.array([row["n"] for row in rows])
    sums = np.array([row["loss"] for row in rows]) * targets
    assert found["loss"] == pytest.approx(sums.sum() / targets.sum())
    draws = rng.integers(len(rows), size=(20_000, len(rows)))
    spread = (sums[draws].sum(1) / targets[draws].sum(1)).std()
    assert found["loss_interval"] == pytest.approx(1.96 * spread, rel=0.1)
