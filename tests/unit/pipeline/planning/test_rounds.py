"""Rounds give each micro-batch to one rank, from any position on, for any number of ranks."""

from itertools import accumulate, chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import plan_in_memory, random_rows

from tokenfeed.pipeline.planning.batching import Rounds, deal_rounds
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.policies import Fixed, Packed, Padded
from tokenfeed.pipeline.planning.policy import Batching
from tokenfeed.pipeline.windows.maker import WindowMaker


@st.composite
def windows(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Step offsets, step size, and how many micro-batches were delivered."""
    step_size = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(1, step_size), min_size=1, max_size=12))
    offsets = [0, *accumulate(sizes)]
    return np.array(offsets), step_size, draw(st.integers(0, offsets[-1] - 1))


WORLD_SIZES = st.integers(1, 40)


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


def listed(rounds: Rounds) -> list[tuple[int, int]]:
    return list(zip(rounds.starts.tolist(), rounds.ends.tolist(), strict=True))


@given(windows(), WORLD_SIZES)
def test_rounds_are_those_of_the_slow_definition(
    window: tuple[np.ndarray, int, int], world_size: int
) -> None:
    offsets, step_size, first = window
    rounds = deal_rounds(offsets, step_size, first=first, rank=0, world_size=world_size)
    assert listed(rounds) == slow_rounds(offsets.tolist(), step_size, first, world_size)


@given(windows(), WORLD_SIZES)
def test_ranks_together_take_every_micro_batch_once_and_in_order(
    window: tuple[np.ndarray, int, int], world_size: int
) -> None:
    offsets, step_size, first = window
    ranks = [
        deal_rounds(offsets, step_size, first=first, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert len({len(rounds.mine) for rounds in ranks}) == 1, "ranks differ in number of steps"
    taken = np.transpose([rounds.mine for rounds in ranks])
    filler = np.transpose([rounds.filler for rounds in ranks])
    assert taken[~filler].tolist() == list(range(first, offsets[-1]))
    for rank, rounds in enumerate(ranks):
        assert listed(rounds) == listed(ranks[0])
        assert not rank or np.array_equal(rounds.ends_step, ranks[0].ends_step)
        assert np.array_equal(rounds.mine[rounds.filler], rounds.starts[rounds.filler])


@given(windows(), WORLD_SIZES)
def test_no_round_crosses_a_step_unless_there_are_ranks_for_several(
    window: tuple[np.ndarray, int, int], world_size: int
) -> None:
    offsets, step_size, first = window
    rounds = deal_rounds(offsets, step_size, first=first, rank=0, world_size=world_size)
    for start, end in listed(rounds):
        crossed = [offset for offset in offsets if start < offset < end]
        if world_size < 2 * step_size:
            assert not crossed
        else:
            assert end in offsets, "a step is torn though there is a rank for each of it"
            assert len(crossed) < world_size // step_size


@given(windows(), WORLD_SIZES)
def test_a_round_ends_a_step_where_the_next_one_begins(
    window: tuple[np.ndarray, int, int], world_size: int
) -> None:
    offsets, step_size, first = window
    rounds = deal_rounds(offsets, step_size, first=first, rank=0, world_size=world_size)
    assert rounds.ends_step.tolist() == [end in offsets for end in rounds.ends]
    assert rounds.ends_step[-1]


@given(windows(), WORLD_SIZES, WORLD_SIZES)
def test_what_is_left_after_any_round_does_not_depend_on_how_it_was_reached(
    window: tuple[np.ndarray, int, int], before: int, world_size: int
) -> None:
    offsets, step_size, first = window

    def dealt(first: int, world_size: int) -> Rounds:
        return deal_rounds(offsets, step_size, first=first, rank=0, world_size=world_size)

    whole = listed(dealt(first, world_size))
    for number, (_, end) in enumerate(whole):
        assert listed(dealt(end, world_size)) == whole[number + 1 :]
    for position in dealt(first, before).ends.tolist():
        rest = listed(dealt(position, world_size))
        assert [start for start, _ in rest] == [position, *(end for _, end in rest)][:-1]
        assert not rest or rest[-1][1] == offsets[-1]


@given(windows(), WORLD_SIZES)
def test_only_a_lone_rank_at_the_beginning_takes_all(
    window: tuple[np.ndarray, int, int], world_size: int
) -> None:
    offsets, step_size, first = window
    rounds = deal_rounds(offsets, step_size, first=first, rank=0, world_size=world_size)
    assert rounds.takes_all == (world_size == 1 and first == 0)
    if rounds.takes_all:
        assert rounds.mine.tolist() == list(range(offsets[-1]))
        assert not rounds.filler.any()


def rows_by_step(lengths: list[int], batching: Batching, world_size: int) -> list[list[int]]:
    """Rows of every step, sorted, over all ranks."""
    plan, reader = plan_in_memory(
        [random_rows(np.array(lengths))], batching, micro_batches_per_step=4
    )
    steps: list[list[int]] = [[]]
    ranks = [
        WindowMaker(plan, reader, rank, world_size).make(Position(0, 0, 0)).batches()
        for rank in range(world_size)
    ]
    for batches in zip(*ranks, strict=True):
        for batch in batches:
            steps[-1] += [] if batch.is_filler else batch.rows.tolist()
        if batches[0].ends_step:
            steps.append([])
    return [sorted(step) for step in steps[:-1]]


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=60),
    st.sampled_from([Padded(40), Fixed(3), Packed(20, 2), Packed(20, 2, split=True)]),
)
def test_a_step_is_the_same_rows_on_any_number_of_ranks(
    lengths: list[int], batching: Batching
) -> None:
    alone = rows_by_step(lengths, batching, 1)
    for world_size in (2, 3, 4, 7):
        assert rows_by_step(lengths, batching, world_size) == alone
    pairs = [sorted(chain(*alone[n : n + 2])) for n in range(0, len(alone), 2)]
    assert rows_by_step(lengths, batching, 8) == pairs
