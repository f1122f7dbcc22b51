"""The learning rate as a function of the step."""

import itertools
import math
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tokenfeed.trainer.config.run_config import ScheduleName
from tokenfeed.trainer.optim.optimizer import learning_rate

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)

schedules = st.sampled_from(SCHEDULES)
peaks = st.floats(1e-8, 1e3)
runs = st.tuples(st.integers(1, 200), st.integers(0, 300))


def rates(schedule: ScheduleName, peak: float, steps: int, warmup_steps: int) -> list[float]:
    """Those of steps 1 to the last."""
    return [
        learning_rate(step, schedule=schedule, peak=peak, steps=steps, warmup_steps=warmup_steps)
        for step in range(1, steps + 1)
    ]


@given(schedules, peaks, runs)
def test_the_rate_rises_in_equal_parts_and_never_again_after_the_warm_up(
    schedule: ScheduleName, peak: float, run: tuple[int, int]
) -> None:
    steps, warmup_steps = run
    found = rates(schedule, peak, *run)
    rising, falling = found[:warmup_steps], found[max(0, warmup_steps - 1) :]
    for step, rate in enumerate(rising, 1):
        assert rate == pytest.approx(peak * step / warmup_steps)
    assert all(before >= after for before, after in itertools.pairwise(falling))
    if 0 < warmup_steps <= steps:
        assert found[warmup_steps - 1] == peak


def cosine(share: float) -> float:
    return 0.55 + 0.45 * math.cos(math.pi * share)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", lambda step: cosine((step - 10) / 90)),
        ("linear", lambda step: 0.1 + 0.9 * (100 - step) / 90),
        ("wsd", lambda step: 1 - math.sqrt((step - 80) / 21) if step > 80 else 1.0),
        ("constant", lambda step: 1.0),
    ],
)
def test_after_the_warm_up_the_rate_is_what_the_formula_says(
    schedule: ScheduleName, expected: Callable[[int], float]
) -> None:
    found = rates(schedule, 2.0, 100, 10)
    for step in range(11, 101):
        assert found[step - 1] == pytest.approx(2.0 * expected(step))


@pytest.mark.parametrize(("schedule", "last"), [("cosine", 0.3), ("linear", 0.3), ("wsd", 0.317)])
def test_the_rate_falls_to_the_least_rate(schedule: ScheduleName, last: float) -> None:
    def rate(step: int, least: float | None) -> float:
        return learning_rate(
            step, schedule=schedule, peak=2.0, steps=100, warmup_steps=10, least=least
        )

    assert rate(100, 0.6) == pytest.approx(2.0 * last, rel=1e-3)
    assert rate(100, 0.0) < 0.05
    assert rate(100, 2.0) == rate(50, 2.0) == 2.0
    assert rate(5, 0.6) == rate(5, None), "the warm-up does not depend on the least rate"
    assert all(0.6 <= rate(step, 0.6) <= 2.0 for step in range(10, 101))


@given(st.sampled_from(["wsd", "constant"]), peaks, runs, st.integers(0, 200), st.integers(1, 200))
def test_a_longer_run_has_the_rates_of_the_shorter_until_that_decays(
    schedule: ScheduleName, peak: float, run: tuple[int, int], more: int, step: int
) -> None:
    steps, warmup_steps = run
    assume(step <= (steps if schedule == "constant" else steps - math.ceil(0.2 * steps)))
    longer = rates(schedule, peak, steps + more, warmup_steps)
    assert longer[step - 1] == rates(schedule, peak, steps, warmup_steps)[step - 1]


def test_a_warm_up_into_the_last_fifth_leaves_the_rest_to_the_decay() -> None:
    expected = [1 - math.sqrt(done / 11) for done in range(11)]
    assert rates("wsd", 1.0, 100, 90)[89:] == pytest.approx(expected)
