"""Packing keeps every piece once, never overfills, and equals slow oracles."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.pipeline.planning.arrangement import crop, pack

CAPACITY = 64
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=200)


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Free room of each bin after placing pieces one by one: the definition."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [free for free in room if free >= length]
        if fitting:
            room[room.index(min(fitting))] -= length
        else:
            room.append(capacity - length)
    return sorted(room)


@given(LENGTHS)
def test_bins_are_those_of_best_fit_decreasing(lengths: list[int]) -> None:
    of_pieces = np.array(lengths)
    order, offsets = pack(np.argsort(of_pieces)[::-1], of_pieces, CAPACITY)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    room = CAPACITY - np.add.reduceat(of_pieces[order], offsets[:-1])
    assert sorted(room.tolist()) == best_fit_decreasing(lengths, CAPACITY)


def test_python_steps_follow_distinct_lengths_not_rows() -> None:
    """A million pieces of ten lengths take a few dozen placements."""
    from tokenfeed.pipeline.planning.arrangement import OpenBins

    bins = OpenBins(2048)
    for length in range(20, 10, -1):
        bins.place(length, 100_000)
    assert len(bins.placed) < 100
    order, offsets = bins.deal(np.arange(1_000_000))
    assert len(order) == 1_000_000
    assert np.diff(offsets).sum() == 1_000_000


def cropped(lengths: list[int], capacity: int) -> list[list[int]]:
    """Tokens of each piece of each bin, piece by piece: the definition."""
    left, bins, room = sorted(lengths), list[list[int]](), 0
    while left:
        if not room:
            bins.append([])
            room = capacity
        fitting = [length for length in left if length <= room]
        taken = max(fitting) if fitting else left[0]
        left.remove(taken)
        bins[-1].append(min(taken, room))
        room -= bins[-1][-1]
    return bins


@given(st.lists(st.integers(1, 90), min_size=1, max_size=200))
def test_cropped_bins_are_those_of_the_slow_definition(lengths: list[int]) -> None:
    ascending = np.array(sorted(lengths))
    used, order, offsets = crop(ascending, CAPACITY)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert (used <= ascending).all()
    bins = [used[order[start:stop]].tolist() for start, stop in pairwise(offsets.tolist())]
    assert bins == cropped(lengths, CAPACITY)
    assert all(sum(each) == CAPACITY for each in bins[:-1])
