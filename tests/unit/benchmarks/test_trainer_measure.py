"""The benchmark of the trainer compares what it says: one model, the same rows, the same clock."""

from pathlib import Path

import pytest
from support.training import write_labelled

from benchmarks.trainer.systems import CASES, Case, by_bare_loop, by_train

STEPS = 4


@pytest.fixture(scope="module", params=[case for case in CASES if case.task != "lm"], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def shards(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("data") / "shards", case.task, 300)  # type: ignore[arg-type]


def test_the_bare_loop_trains_the_batches_of_train_to_the_same_loss(
    case: Case, shards: Path
) -> None:
    ours, bound = by_train(case, shards, STEPS), by_bare_loop(case, shards, STEPS)
    assert ours.tokens == bound.tokens
    assert ours.slots == bound.slots
    assert len(ours.clock.wall) == len(bound.clock.wall) == STEPS
    assert ours.loss == pytest.approx(bound.loss, rel=1e-4)
