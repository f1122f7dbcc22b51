"""The benchmark of situations compares what it says: one model, the same rows, the same loss."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.scenarios import before as scenarios_before
from benchmarks.scenarios import data as scenarios_data
from benchmarks.scenarios import disk as scenarios_disk
from benchmarks.scenarios.before import Encoder, new_model
from benchmarks.scenarios.case import SCENARIOS, SIDES, Scenario, settings_of
from benchmarks.scenarios.data import Data
from benchmarks.scenarios.disk import CLOUD_VOLUME
from tokenfeed import Fixed, ShardLoader
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.loop.trainer import Trainer

ROWS = 24
SOURCE = '''"""Text of a module, which says what it is for."""

# A comment that is as long as a tweet is, more or less.
def add(a, b):
    """The sum of both."""
    return a + b  # {number}
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(params=list(SCENARIOS))
def scenario(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """One situation, with few short steps and no other process."""
    files = [("xml" if n % 2 else "email", SOURCE.format(number=n)) for n in range(40)]
    monkeypatch.setattr(scenarios_data, "sources", lambda: iter(files))
    monkeypatch.setattr(scenarios_before, "WORKERS", 0)
    found = SCENARIOS[request.param]
    return dataclasses.replace(found, steps=ROWS // found.loop.rows)


@pytest.fixture
def data(scenario: Scenario, folder: Path) -> Data:
    return scenarios_data.make(scenario.data, folder)


@pytest.mark.long
def test_both_sides_train_as_many_rows_of_one_model(scenario: Scenario, data: Data) -> None:
    before, after = (side(scenario, data, 0) for side in SIDES.values())
    for outcome in (before, after):
        assert math.isfinite(outcome.loss)
        assert sum(outcome.stall.values()) < 1
    trained = [outcome.marks.tokens[-1] for outcome in (before, after)]
    assert trained[1] == pytest.approx(trained[0], rel=0.25)  # of other rows, where not all are
    if data.task != "lm":
        assert after.marks.padding <= before.marks.padding


@pytest.mark.parametrize("scenario", ["b", "c", "e"], indirect=True)
def test_both_sides_begin_with_the_same_weights(
    scenario: Scenario, data: Data, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    before = new_model(data).state_dict()
    trainer = Trainer(TrainConfig(**settings_of(scenario, data), run_dir=tmp_path / "run"))
    after = trainer.learner.model.model.state_dict()  # type: ignore[union-attr]
    trainer.close()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.long
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("scenario", ["e"], indirect=True)
def test_a_save_of_either_side_lasts_as_long_as_its_bytes_take(
    side: str, scenario: Scenario, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    stopped = SimpleNamespace(perf_counter=lambda: 0.0, sleep=slept.append)
    monkeypatch.setattr(scenarios_disk, "time", stopped)
    SIDES[side](scenario, data, 0)
    weights = sum(weight.nbytes for weight in new_model(data).parameters())
    assert len(slept) >= scenario.steps // 5
    assert min(slept) > 3 * weights / CLOUD_VOLUME, "weights, and two moments"
    assert max(slept) < 4 * weights / CLOUD_VOLUME


@pytest.mark.parametrize("scenario", ["b", "c", "d"], indirect=True)
def test_both_sides_have_the_same_ids_and_labels(scenario: Scenario, data: Data) -> None:
    rows = Encoder(data).encode(data.train)
    before = sorted((row["input_ids"], row["labels"]) for row in rows)
    with ShardLoader(data.shards, batching=Fixed(1), num_workers=0, device="cpu") as loader:
        after = [(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in loader]
    assert before == sorted(after)
