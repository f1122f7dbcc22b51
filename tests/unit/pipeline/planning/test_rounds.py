"""Rounds give each micro-batch to one rank, from any position on, for any number of ranks."""

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.pipeline.planning.batching import deal_rounds


@st.composite
def windows(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Step offsets, step size, and how many micro-batches were delivered."""
    step_size = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(1, step_size), min_size=1, max_size=12))
    offsets = [0, *accumulate(sizes)]
    return np.array(offsets), step_size, draw(st.integers(0, offsets[-1] - 1))


def slow_rounds(
    offsets: list[int], step_size: int, first: int, world_size: int
) -> list[tuple[int, int]]:
    """One round after the other: the definition."""
    rounds = []
    while first < offsets[-1]:
        step = sum(offset <= first for offset in offsets) - 1
        together = max(1, world_size // step_size)
        end = offsets[min(step + together, len(offsets) - 1)]
        rounds.append((first, min(end, first + world_size)))
        first = rounds[-1][1]
    return rounds


@given(windows(), st.integers(1, 40))
def test_rounds_of_ranks_are_the_slow_definition_and_take_every_micro_batch_once(
    window: tuple[np.ndarray, int, int], world_size: int
) -> None:
    offsets, step_size, first = window
    ranks = [
        deal_rounds(offsets, step_size, first=first, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    due = slow_rounds(offsets.tolist(), step_size, first, world_size)
    taken = np.transpose([rounds.mine for rounds in ranks])
    filler = np.transpose([rounds.filler for rounds in ranks])
    assert taken[~filler].tolist() == list(range(first, offsets[-1]))
    for rounds in ranks:
        assert list(zip(rounds.starts.tolist(), rounds.ends.tolist(), strict=True)) == due
        assert rounds.takes_all == (world_size == 1 and first == 0)
        assert (rounds.steps > 0).tolist() == [end in offsets for end in rounds.ends]
        assert np.array_equal(rounds.steps, ranks[0].steps)
        assert np.array_equal(rounds.mine[rounds.filler], rounds.starts[rounds.filler])
