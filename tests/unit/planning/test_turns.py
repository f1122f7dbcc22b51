"""Turns: every step is somebody's, and everybody's share is right over any stretch."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenfeed.pipeline.planning.turns import Turns

weights = st.lists(st.sampled_from([0.1, 0.3, 0.7, 1.0, 2.5, 40.0]), min_size=1, max_size=5)
seeds = st.integers(0, (1 << 63) - 1)


@settings(max_examples=50)
@given(weights, seeds, st.integers(0, 10**12), st.integers(1, 300))
def test_over_any_stretch_everybody_has_its_share(
    weights: list[float], seed: int, first: int, count: int
) -> None:
    turns = Turns(weights, seed)
    found = Counter(turns.whose(step) for step in range(first, first + count))
    shares = [Fraction(str(weight)) for weight in weights]
    for number, share in enumerate(shares):
        wanted = count * share / sum(shares)
        assert abs(found[number] - wanted) < 2 * len(weights)


@settings(max_examples=50)
@given(weights, seeds)
def test_from_the_first_step_on_nobody_strays_by_as_many_steps_as_there_are(
    weights: list[float], seed: int
) -> None:
    turns, found = Turns(weights, seed), Counter[int]()
    shares = [Fraction(str(weight)) for weight in weights]
    for step in range(200):
        found[turns.whose(step)] += 1
        for number, share in enumerate(shares):
            assert abs(found[number] - (step + 1) * share / sum(shares)) < max(1, len(weights) - 1)


def test_equal_weights_of_two_alternate() -> None:
    dealt = [Turns([0.5, 0.5], seed=3).whose(step) for step in range(20)]
    assert all(one != other for one, other in pairwise(dealt))


@pytest.mark.parametrize("weights", [[0.7, 0.3], [1, 2, 3]])
def test_the_seed_shifts_turns_and_only_proportions_matter(weights: list[float]) -> None:
    def dealt(weights: list[float], seed: int) -> list[int]:
        return [Turns(weights, seed).whose(step) for step in range(100)]

    assert dealt(weights, 5) == dealt([10 * weight for weight in weights], 5)
    assert len({tuple(dealt(weights, seed)) for seed in range(20)}) > 1
