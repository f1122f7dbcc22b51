"""A state continues with exactly the rest, on any number of ranks, and is refused elsewhere."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from support.delivery import (
    POLICIES,
    check_elastic_run,
    open_loader,
    realistic_lengths,
    spans,
)

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.planning.policy import Batching

LENGTHS = realistic_lengths()


SAME_FOLDER = [HealthCheck.function_scoped_fixture]


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
