"""`--headspace N`: a bound that is measured, on steps that leave no trace."""

import dataclasses
from pathlib import Path

import pytest
import torch
from training import RUNS, make_config, read_metrics, run, write_every_task

from tokenfeed.trainer import headspace
from tokenfeed.trainer.config import ScheduleName
from tokenfeed.trainer.headspace import ready_tokens_per_s
from tokenfeed.trainer.learner import Learner
from tokenfeed.trainer.ranks.world import World

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_every_task(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("way", ["lm packed", "classify padded", "masked packed"])
def test_training_goes_on_as_if_nothing_had_been(data: Path, tmp_path: Path, way: str) -> None:
    settings = RUNS[way] | {"steps": 3, "dropout": 0.1}
    config = make_config(data / settings.pop("shards"), tmp_path / "plain", **settings)
    plain = run(config)
    tried = run(dataclasses.replace(config, headspace=4, run_dir=tmp_path / "tried"))
    assert plain.headspace_tokens_per_s is None
    assert tried.headspace_tokens_per_s is not None
    assert tried.headspace_tokens_per_s > 0
    assert "with ready batches" in tried.summary()
    for key in ("loss", "gradient_norm", "validation_loss"):
        assert read_metrics(tmp_path / "plain", key) == read_metrics(tmp_path / "tried", key)


def test_a_resumed_run_may_try_too_and_a_finished_one_does_not_care(
    data: Path, tmp_path: Path
) -> None:
    config = make_config(data / "lm", tmp_path / "run", steps=2)
    run(config)
    longer = dataclasses.replace(config, steps=4, resume=True, headspace=2)
    report = run(longer)
    assert report.headspace_tokens_per_s is not None
    assert run(dataclasses.replace(longer, headspace=5)) == report


@pytest.mark.slow
def test_the_bound_is_the_tokens_of_the_steps_by_their_time(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that goes on by a second for each micro-batch."""
    now, steps = [0.0], [0]
    add, step = Learner.add_gradients, Learner.step

    def slowly(learner: Learner, micro_batch: object) -> object:
        now[0] += 1.0
        return add(learner, micro_batch)  # type: ignore[arg-type]

    def counted(learner: Learner, number: int, targets: torch.Tensor) -> torch.Tensor:
        steps[0] += 1
        return step(learner, number, targets)

    monkeypatch.setattr(Learner, "add_gradients", slowly)
    monkeypatch.setattr(Learner, "step", counted)
    monkeypatch.setattr(headspace.time, "perf_counter", lambda: now[0])
    settings = {"micro_batch_tokens": 64, "step_tokens": 256, "headspace": 70}
    config = make_config(data / "lm", tmp_path / "run", batching="packed", **settings)
    found = ready_tokens_per_s(config, World(CPU))
    assert steps[0] == 3 + 70
    assert found is not None
    assert 0.9 * 64 < found <= 64  # real tokens a micro-batch, which has hardly any padding


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize(("steps", "warmup_steps"), [(2, 2), (2, 3), (1, 1)])
def test_more_steps_may_be_tried_than_the_run_and_its_warm_up_have(
    data: Path, tmp_path: Path, schedule: ScheduleName, steps: int, warmup_steps: int
) -> None:
    settings = {"steps": steps, "warmup_steps": warmup_steps, "schedule": schedule}
    config = make_config(data / "lm", tmp_path, headspace=steps + 4, model="bag", **settings)
    found = ready_tokens_per_s(config, World(CPU))
    assert found is not None
    assert found > 0
