"""A state continues with exactly the rest, on any number of ranks, and is refused elsewhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delivery import (
    POLICIES,
    MakeDataset,
    Ranks,
    joined,
    open_loader,
    realistic_lengths,
    small_batches,
    spans,
    times_delivered,
)
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.planning.policy import Batching

LENGTHS = realistic_lengths()


SAME_FOLDER = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_batches(monkeypatch)


@pytest.fixture
def folder(make_dataset: MakeDataset, small: None) -> Path:
    return make_dataset(LENGTHS, num_shards=3)


def check_elastic_run(
    folder: Path,
    lengths: np.ndarray,
    legs: list[tuple[int, int, int]],
    *,
    micro_batches_per_step: int,
    epochs: int,
    **options: Any,
) -> None:
    """Run legs of (world size, rounds, workers) and a last one to the end; compare with one run."""
    options |= {"micro_batches_per_step": micro_batches_per_step, "epochs": epochs}
    alone = Ranks(folder, 1, **options)
    final = alone.run()
    runs: list[Ranks] = []
    state = None
    for number, (world_size, rounds, num_workers) in enumerate(legs):
        last = number + 1 == len(legs)
        runs.append(Ranks(folder, world_size, state, num_workers=num_workers, **options))
        state = runs[-1].run(None if last else rounds)
        if state["epoch"] == epochs:  # further legs would be the next pass
            break
    assert state == final, "digest or position differs"
    steps, whole = joined(runs), joined([alone])
    pieces = (span for step in steps for batch in step for span in batch)
    assert times_delivered(pieces, lengths) == {epochs}
    assert [batch for step in steps for batch in step] == [b for step in whole for b in step]
    if all(world_size < 2 * micro_batches_per_step for world_size, _, _ in legs):
        assert steps == whole


@settings(
    max_examples=2, suppress_health_check=SAME_FOLDER, phases=[Phase.explicit, Phase.generate]
)
@given(
    legs=st.lists(
        st.tuples(st.integers(1, 2), st.integers(0, 60), st.integers(1, 2)), min_size=2, max_size=2
    ),
    batching=st.sampled_from(POLICIES),
)
@example(legs=[(2, 13, 2), (1, 0, 0), (3, 11, 1), (1, 0, 4)], batching=POLICIES[0])
def test_workers_that_prefetch_are_not_in_the_state(
    folder: Path, legs: list[tuple[int, int, int]], batching: Batching
) -> None:
    check_elastic_run(folder, LENGTHS, legs, batching=batching, micro_batches_per_step=3, epochs=2)


def test_loading_a_state_in_the_middle_of_the_loop_goes_there(folder: Path) -> None:
    with open_loader(folder, num_workers=2) as loader:
        feed = iter(loader)
        first = [spans(next(feed)) for _ in range(9)]
        state = loader.state_dict()
        second = [spans(next(feed)) for _ in range(9)]
        loader.load_state_dict(state)
        assert [spans(next(feed)) for _ in range(9)] == second != first


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_micro_batch_that_a_window_lacks_is_refused(folder: Path, num_workers: int) -> None:
    loader = open_loader(folder, num_workers=num_workers)
    loader.load_state_dict(loader.state_dict() | {"micro_batch": 10**6})
    with loader, pytest.raises(ResumeError, match="window 0 has no micro-batch 1000000"):
        list(loader)
