"""A state continues with exactly the rest, on any number of ranks, and is refused elsewhere."""

from pathlib import Path

import pytest
from support.delivery import (
    POLICIES,
    check_elastic_run,
    open_loader,
    realistic_lengths,
    spans,
)

from tokenfeed.pipeline.errors import ResumeError

LENGTHS = realistic_lengths()


def test_workers_that_prefetch_are_not_in_the_state(folder: Path) -> None:
    legs = [(2, 13, 2), (1, 0, 0), (3, 11, 1), (1, 0, 2)]
    check_elastic_run(
        folder, LENGTHS, legs, batching=POLICIES[0], micro_batches_per_step=3, epochs=2
    )


def test_loading_a_state_in_the_middle_of_the_loop_goes_there(folder: Path) -> None:
    with open_loader(folder, num_workers=1) as loader:
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
