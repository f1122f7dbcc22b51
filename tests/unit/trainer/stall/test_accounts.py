"""The parts of the stall's accounts, each a function of numbers, against slow or exact oracles."""

import hashlib
import os
import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT
from support.stall_scenarios import CLEAN, FAULTS, measure

from tokenfeed.trainer.stall import CAUSES
from tokenfeed.trainer.stall.accounts import LostLead
from tokenfeed.trainer.stall.causes import ABOUT
from tokenfeed.trainer.stall.device import Calibration, ClockMap
from tokenfeed.trainer.stall.reading import (
    BatchMeans,
    Charge,
    Histogram,
    LinearFit,
    SpanKind,
    StallReading,
    WorkSums,
)
from tokenfeed.trainer.stall.stall_report import cause_table, headline
from tokenfeed.trainer.stall.watchers import CoreWait

seconds = st.floats(0.0, 100.0)


@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 100.0)), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_within_some_percent_of_the_sorted_values(
    values: list[float], share: float
) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    assert histogram.quantile(share, len(values)) == pytest.approx(exact, rel=0.04)
    assert histogram.largest == max(values)


@pytest.mark.parametrize("drift", [-1e-4, -5e-6, 0.0, 5e-6, 1e-4])
def test_clock_map_never_overstates_a_lead_whatever_the_drift(drift: float) -> None:
    draw, clocks, errors = random.Random(1), ClockMap(), []
    passed, pause = 0.0, 10.0
    for number in range(20_000):
        queued = pause + 0.01 * number
        lead = 0.0 if number % 50 == 0 else draw.random() * 0.01
        passed = max(passed, queued + lead)
        found = clocks.add(passed * (1 + drift) + 77.0, queued)
        errors.append(passed - found)
    assert min(errors) >= 0.0
    assert max(errors) <= 0.5 * 3e-4 + 0.01 * 0.01


def test_a_debt_is_paid_once_and_forgotten_when_the_lead_is_back() -> None:
    lost_lead = LostLead()
    lost_lead.record("log", 5.0, 0.0)
    assert lost_lead.take(2.0) == 2.0
    assert lost_lead.take(9.0) == 3.0
    assert lost_lead.take(1.0) == 0.0
    lost_lead.record("log", 5.0, 0.0)
    lost_lead.update(4.0)
    assert lost_lead.take(9.0) == 1.0
    lost_lead.record("wait", 5.0, 5.0)
    assert lost_lead.take(9.0) == 0.0


def test_the_interval_of_batch_means_holds_the_mean_of_correlated_steps() -> None:
    held = 0
    for seed in range(200):
        draw, state, batches, idle = random.Random(seed), 0.0, BatchMeans(), 0.0
        for _ in range(1000):
            state = 0.8 * state + draw.gauss(0, 1)
            batches.add(1.0, {"data": 0.1 + 0.01 * state})
            idle += 0.1 + 0.01 * state
        half = batches.half_width("data")
        assert half is not None
        held += abs(idle / 1000 - 0.1) <= half
    assert held >= 180


def test_few_steps_have_no_interval_and_many_take_bounded_memory() -> None:
    batches = BatchMeans()
    for _ in range(7):
        batches.add(1.0, {"data": 0.5})
    assert batches.half_width("data") is None
    for _ in range(10_000):
        batches.add(1.0, {"data": 0.5})
    assert len(batches.batches) <= 64
    assert sum(batch.steps for batch in batches.batches) == 10_007
    assert batches.half_width("data") == pytest.approx(0.0, abs=1e-9)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.0, 10.0)), min_size=5))
def test_a_line_is_that_of_least_squares(points: list[tuple[int, float]]) -> None:
    line = LinearFit()
    for slots, taken in points:
        line.add(float(slots), taken)
    x, y = np.array([p[0] for p in points], float), np.array([p[1] for p in points])
    assert line.total(len(points), x.sum()) == pytest.approx(y.sum(), rel=1e-6, abs=1e-6)
    if np.ptp(x) > 0.01 * x.max():
        slope, offset = np.polyfit(x, y, 1)
        assert line.total(1, 1000.0) == pytest.approx(slope * 1000 + offset, rel=1e-3, abs=1e-3)


def test_the_table_of_causes_in_the_documentation_has_all_and_says_the_same() -> None:
    text = (ROOT / "docs/how/stall.md").read_text()
    rows = re.findall(r"^\| `([a-z ]+)` \| ([^|]+) \|", text, re.MULTILINE)
    told = {cause: meaning.replace("`", "") for cause, meaning in rows if cause in CAUSES}
    assert list(told.items()) == [(cause, about.meaning) for cause, about in ABOUT.items()]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="counted by Linux alone")
def test_core_wait_counts_the_time_without_a_core() -> None:
    def hash_much() -> None:
        for _ in range(5):
            hashlib.blake2b(bytes(10_000_000))  # without the lock of Python

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # of this thread, and of those that it starts
    try:
        others = [threading.Thread(target=hash_much) for _ in range(2)]
        watch = CoreWait()
        for other in others:
            other.start()
        hash_much()
        share = watch.share()
        for other in others:
            other.join()
    finally:
        os.sched_setaffinity(0, cores)
    assert share is not None
    assert 0.3 < share <= 1.0


def test_table_has_the_largest_cause_first_and_work_last() -> None:
    fault = FAULTS["a slow log"]
    report = measure(fault.change(CLEAN), fault)
    lines = cause_table(report)
    assert lines[1].startswith("log ")
    assert lines[-1].startswith("work ")
    assert "of 3" in headline(report) or "of 7" in headline(report)


def slowdown(ranks: int, jitter: float) -> float:
    """Of ranks that meet in each step, by the spins that each of them decides on by itself."""
    draw, spinning = random.Random(ranks), [Calibration(5) for _ in range(ranks)]
    now = begun = bare = 0.0
    for step in range(2000):
        longest = held_up = 0.0
        for calibration in spinning:
            host, spun = 5e-3 * draw.lognormvariate(0, jitter), 0.0
            for part in (1, 2):
                spun += calibration.open(now + spun + host / 2 * (part - 1))
                calibration.close(now + spun + host / 2 * part)
            longest, held_up = max(longest, host), max(held_up, host + spun)
        now += held_up
        for calibration in spinning:
            calibration.end_step(now, 0.5)
        bare += longest if step >= 5 else 0.0
        begun = now if step == 4 else begun
    return (now - begun) / bare - 1


@pytest.mark.parametrize("jitter", [0.05, 0.2])
@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_spins_of_all_ranks_take_half_a_percent(ranks: int, jitter: float) -> None:
    assert 0 < slowdown(ranks, jitter) <= 0.005


def test_calibration_after_slow_first_step_spins_briefly() -> None:
    """A first step compiles for seconds."""
    calibration, now, spun = Calibration(5), 0.0, 0.0
    for step in range(10):
        spun += calibration.open(now)
        now += 3.0 if step == 0 else 5e-3
        calibration.close(now)
        calibration.end_step(now, 0.5)
    assert 3 * 5e-3 < spun < 6 * 5e-3


def test_reference_error_counts_spans_of_its_cause_only() -> None:
    kind, reference = SpanKind("data", "step"), LinearFit()
    for span_seconds in (9.0, 11.0, 9.0, 11.0):
        reference.add(1000, span_seconds)
    sums = {"launch": WorkSums(2, 2000, 21.0, 20.0), "wait": WorkSums(3, 3000, 31.0, 20.0)}
    reading = StallReading(
        steps=5,
        tokens=0,
        slots=5000,
        seconds=52.0,
        gaps={},
        work={Charge(kind, cause): found for cause, found in sums.items()},  # type: ignore[arg-type]
        references={kind: reference},
    )
    assert reading.reference_error("data") == 0.0
    assert reading.reference_error("launch") == reference.half_width(2)
    assert reading.reference_error("wait") == reference.half_width(3)
    assert reading.reference_error() == reference.half_width(5)
