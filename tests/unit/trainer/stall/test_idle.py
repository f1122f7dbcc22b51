"""The idle accounts: exact cases, bounded memory, and each correction of the method.

Random loops run on a simulated device with the real meter (`benchmarks/stall`). What the meter adds
to its accounts is recorded once, so that a test can read accounts in which one correction is
missing.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from benchmarks.stall.loops import FAMILIES, Loop, draw, draw_new, run
from benchmarks.stall.simulated import SLACK, judge, run_metered
from tokenfeed.trainer.stall import idle, meter
from tokenfeed.trainer.stall.idle import Accounts, Idle, Step, TracedStep

# exact cases


def step(number: int, work: float = 0.01, **figures: Any) -> Step:
    return Step(**({"size": 1.0, "ahead": 0.0, "gaps": {}, "marks": 0} | figures), number=number, work=work)


def traced(number: int, busy: float, trace: int, **figures: Any) -> TracedStep:
    usual: dict[str, Any] = {"size": 1.0, "kernels": 0, "span": 0.01}
    return TracedStep(number=number, busy=busy, trace=trace, **(usual | figures))


def filled(
    steps: int, traces: dict[int, list[TracedStep]], make: Callable[[int], Step] = step, **options: float
) -> Accounts:
    """Return accounts of these steps, with a trace before each step that has one."""
    accounts = Accounts(**({"mark_seconds": 0.0} | options))
    for number in range(steps):
        if number in traces:
            accounts.add_trace(traces[number])
        accounts.add(make(number))
    return accounts


def test_accounts_steady_device_reports_work_minus_busy() -> None:
    traces = {at: [traced(at, 0.007, at)] for at in (10, 50, 90)}
    read = filled(100, traces).read()
    assert read.seconds == pytest.approx(1.0)
    assert read.inside[0] == pytest.approx(0.3)
    low, high = read.interval
    assert low == pytest.approx(0.3 - 0.003 * 0.7) and high == pytest.approx(0.3 + 0.003 * 0.7)


def test_accounts_speed_change_widens_interval_as_documented() -> None:
    read = filled(100, {0: [traced(0, 0.007, 1)], 99: [traced(99, 0.008, 2)]}).read()
    assert read.inside[0] == pytest.approx(0.25, abs=1e-4)
    assert read.inside[2] - read.inside[0] == pytest.approx(1.2 * 100 * 0.001, rel=0.01)


def test_accounts_step_queued_in_time_is_not_idle() -> None:
    traces = {at: [traced(at, 0.007, at)] for at in (10, 90)}
    read = filled(100, traces, lambda number: step(number, ahead=0.01)).read()
    assert read.inside == (0.0, 0.0, 0.0)


def test_accounts_ahead_step_that_waits_for_other_ranks_is_idle() -> None:
    traces = {at: [traced(at, 0.007, at, exchanging=0.003)] for at in (10, 90)}
    read = filled(100, traces, lambda number: step(number, ahead=0.01)).read()
    assert read.inside[0] == pytest.approx(0.3)
    assert read.inside_causes["communication"] == pytest.approx(0.3)


def test_accounts_without_trace_reports_gaps_and_bound() -> None:
    read = filled(100, {}, lambda number: step(number, ahead=0.004, gaps={"data": 0.002})).read()
    assert not read.is_inside_measured
    assert read.bound == pytest.approx((0.2, 0.8))
    assert read.gaps == {"data": pytest.approx(0.2)}


def test_accounts_rare_gap_in_left_out_step_counts_once() -> None:
    """Gaps of most steps are scaled to all steps. An evaluation is not."""

    def make(number: int) -> Step:
        gaps = {"data": 0.001} | ({"evaluation": 1.0} if number == 50 else {})
        return step(number, gaps=gaps, is_usable=number % 10 != 0)

    read = filled(100, {}, make).read()
    assert read.steps == 100
    assert read.gaps == {"data": pytest.approx(0.1), "evaluation": pytest.approx(1.0)}


def test_accounts_more_steps_left_out_in_one_half_are_not_biased() -> None:
    """A host with lead leaves out 20 steps after a trace, else 1: here in the long steps."""
    traces = {at: [traced(at, 0.008, at)] for at in (100, 200, 300)}

    def make(number: int) -> Step:
        is_second = number >= 200
        return step(number, 0.02 if is_second else 0.01, is_usable=not (is_second and number % 3 == 0))

    assert filled(400, traces, make).read().seconds == pytest.approx(6.0, rel=0.01)


def test_accounts_million_steps_stay_small_and_quick_to_read() -> None:
    """Steps are folded: the same figures as for 2,000 steps, in bounded memory."""
    noise = np.random.default_rng(0).uniform(0.98, 1.02, 1000)

    def make(number: int) -> Step:
        return step(number, 0.01 * float(noise[number % 1000]) * (1.5 if number % 50 == 7 else 1))

    def accounts_of(steps: int, distance: int) -> Accounts:
        traces = {at: [traced(at, 0.007, at)] for at in range(10, steps, distance)}
        return filled(steps, traces, make)

    short, long = accounts_of(2000, 100), accounts_of(200_000, 500)
    assert long.read().stall == pytest.approx(short.read().stall, abs=0.002)
    assert long.read().traces <= 64
    size = sum(array.nbytes for array in vars(long).values() if isinstance(array, np.ndarray))
    assert size < 300_000 and len(long._recent) < 2000
    began = time.process_time()
    for _ in range(10):
        long.read()
    assert (time.process_time() - began) / 10 < 0.05


# random loops, with the meter


@dataclass
class Recorded:
    """What a meter added to its accounts in a loop, and what is true."""

    loop: Loop
    truth: float
    events: list[Step | list[TracedStep]]

    def read(self, change: Callable[[Any], Any] = lambda event: event, **options: float) -> Idle:
        """Read accounts with these events. `change` may drop or alter an event."""
        accounts = Accounts(**options)
        for event in map(change, self.events):
            if isinstance(event, Step):
                accounts.add(event)
            elif event:
                accounts.add_trace(event)
        return accounts.read()


class RecordingAccounts(Accounts):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.events: list[Step | list[TracedStep]] = []

    def add(self, step: Step) -> None:
        self.events.append(step)
        super().add(step)

    def add_trace(self, steps: list[TracedStep]) -> None:
        self.events.append(steps)
        super().add_trace(steps)


USUAL_LOOPS, NEW_LOOPS, STEPS = 70, 6, 600


def _is_quick(loop: Loop) -> bool:
    return loop.kernels * loop.parts < 700 or bool(loop.graphs)


def _loops() -> Iterator[Loop]:
    usual = [loop for seed in range(5000, 5200) if _is_quick(loop := draw(seed))]
    yield from usual[:USUAL_LOOPS]
    for family in FAMILIES:
        new = [loop for seed in range(60) if _is_quick(loop := draw_new(family, seed))]
        yield from new[: 1 if family == "8 ranks" else NEW_LOOPS]


@pytest.fixture(scope="module")
def recorded() -> list[Recorded]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meter, "Accounts", RecordingAccounts)
        for loop in _loops():
            loop = replace(loop, steps=STEPS)
            truths = [sum(rank.truth().values()) for rank in run(loop)]
            for truth, rank in zip(truths, run_metered(loop), strict=True):
                accounts = rank.meter._accounts  # type: ignore[union-attr]
                assert isinstance(accounts, RecordingAccounts)
                found.append(Recorded(loop, truth, accounts.events))
    return found


def holds(each: Recorded, read: Idle, slack: float = SLACK) -> bool:
    low, high = read.interval
    return low - slack <= each.truth <= high + slack


def share_held(found: list[Recorded], *arguments: Any, slack: float = SLACK, **options: Any) -> float:
    return statistics.mean(
        holds(each, each.read(*arguments, **options), slack) for each in found
    )


def width(found: list[Recorded], *arguments: Any, **options: Any) -> float:
    intervals = [each.read(*arguments, **options).interval for each in found]
    return statistics.median(high - low for low, high in intervals)


def worst(found: list[Recorded], *arguments: Any, **options: Any) -> list[float]:
    return sorted(abs(each.read(*arguments, **options).stall - each.truth) for each in found)
