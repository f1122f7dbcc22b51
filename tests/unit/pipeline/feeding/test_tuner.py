"""The number of readers is the one that keeps up, found by measuring, and then it stays."""

import random
from itertools import pairwise

import pytest

from tokenfeed.pipeline.feeding.delivery import Tuner


def simulate(
    made_s: float, used_s: float, *, start: int = 1, most: int = 64, noise: float = 0.0
) -> list[int]:
    """Numbers of workers after each of 400 windows."""
    draw = random.Random(0)
    tuner, workers, history = Tuner(most), start, []
    for _ in range(400):
        tuner.add(
            made_s * draw.uniform(1 - noise, 1 + noise), used_s * draw.uniform(1 - noise, 1 + noise)
        )
        workers = tuner.suggest(workers)
        history.append(workers)
    return history


@pytest.mark.parametrize("start", [1, 2, 7, 40])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.7, 1.0, 2.3, 3.0, 7.9, 20.0])
def test_it_settles_on_workers_that_keep_up_and_few_more(ratio: float, start: int) -> None:
    history = simulate(ratio * 0.05, 0.05, start=start)
    settled = history[-1]
    assert set(history[40:]) == {settled}
    assert settled > ratio, "they would not keep up"
    assert settled <= 1.25 * ratio + 2, "they cost memory for nothing"


@pytest.mark.parametrize("ratio", [0.79, 0.8, 0.81, 1.6, 2.4, 3.2, 4.0, 8.0, 16.0])
@pytest.mark.parametrize("start", [1, 12])
def test_it_does_not_come_and_go_near_an_integer(ratio: float, start: int) -> None:
    """A fourth more than needed is asked for: these ratios make it an integer."""
    settled = simulate(ratio * 0.05, 0.05, start=start, noise=0.1)[100:]
    changes = sum(before != after for before, after in pairwise(settled))
    assert changes <= 3
    assert min(settled) > ratio


@pytest.mark.parametrize("most", [1, 3])
def test_it_stays_between_one_and_most(most: int) -> None:
    assert set(simulate(1e-9, 10.0, most=most)) == {1}
    assert simulate(10.0, 0.0, most=most)[-1] == most
    assert simulate(0.0, 0.0, most=most)[-1] == 1
    assert max(simulate(10.0, 0.1, most=most, noise=0.5)) == most


def test_it_follows_a_loop_that_changes_its_speed() -> None:
    tuner, workers = Tuner(32), 1
    seen = []
    for used_s in (0.1, 0.01, 0.1):
        for _ in range(40):
            tuner.add(0.05, used_s)
            workers = tuner.suggest(workers)
        seen.append(workers)
    assert seen[0] == 1
    assert seen[1] >= 6
    assert seen[2] == 1


def test_one_slow_window_changes_nothing() -> None:
    tuner, workers = Tuner(32), 2
    for number in range(60):
        tuner.add(5.0 if number % 15 == 7 else 0.07, 0.05)
        workers = tuner.suggest(workers)
        assert workers == 2


def test_it_measures_some_windows_before_it_changes_anything() -> None:
    assert simulate(1.0, 0.1)[:3] == [1, 1, 1]
