"""What ranks agree on: the same on each, and each step counted once."""

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.trainer.distributed.world import StepSync, World

Counts = tuple[int, int]
"""Tokens and slots of a step on a rank."""


class OneOfTwo(World):
    """Learns what both ranks told when it waits."""

    size = 2

    def __init__(self, told: list[list[int]]) -> None:
        super().__init__(torch.device("cpu"))
        self._told, self._step = told, 0

    def all_reduce_async(self, counts: list[int]) -> Callable[[], list[int]]:
        """What is told of a step is added to that of the rank before."""
        step, self._step = self._step, self._step + 1
        self._told[step] = [a + b for a, b in zip(self._told[step], counts, strict=True)]
        return lambda: self._told[step]


@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 9), st.integers(0, 9))] * 2), max_size=6))
def test_tokens_and_slots_of_a_step_are_those_of_all_ranks(
    steps: list[tuple[Counts, Counts]],
) -> None:
    told = [[0, 0, 0, 0] for _ in steps]
    ranks = [StepSync(OneOfTwo(told)) for _ in range(2)]
    known: list[list[Counts]] = [[], []]
    for each in steps:
        for rank, (tokens, slots), found in zip(ranks, each, known, strict=True):
            found.append(rank.after_step(stop=False, save=False, tokens=tokens, slots=slots))
    whole = [tuple(map(sum, zip(*each, strict=True))) for each in steps]
    for rank, found in zip(ranks, known, strict=True):
        assert found == [(0, 0), *whole[:-1]][: len(steps)]
        rank.wait()
        assert (rank.tokens, rank.slots) == tuple(map(sum, zip((0, 0), *whole, strict=True)))
