"""The stall meter on a simulated device, whose idle time is known: every regime, every fault."""

from dataclasses import replace

import pytest
from stall_scenarios import CLEAN, FAULTS, REGIMES, WARMUP, Loop, Run, measure, truth

from tokenfeed.trainer.stall import StallMeter, StallReport

POINT = 0.01
"""How far the meter may be off: a percentage point."""

SHORT = replace(CLEAN, steps=100)


FEW = {
    "data-bound": replace(REGIMES["data-bound"], kernels=20, kernel_seconds=500e-6, steps=100),
    "launch-bound": replace(
        REGIMES["launch-bound"], kernels=40, launch_seconds=20e-6, data_seconds=0.2e-3, steps=100
    ),
    "mixed": replace(REGIMES["mixed"], kernels=40, kernel_seconds=30e-6, steps=100),
    "gpu-bound": replace(CLEAN, kernels=20, kernel_seconds=500e-6, steps=100),
}
"""The same regimes with fewer kernels, for many runs."""


def assert_parts_sum(report: StallReport) -> None:
    parts = sum(part.seconds for part in report.causes.values())
    assert report.stall == pytest.approx(parts / report.seconds)
    assert all(part.seconds >= 0 for part in report.causes.values())


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
def test_the_stall_of_every_regime_is_within_a_point_of_the_truth(regime: str) -> None:
    loop = replace(REGIMES[regime], steps=REGIMES[regime].steps // 2)
    report = measure(loop)
    assert report.stall == pytest.approx(truth(loop).idle, abs=POINT)
    assert_parts_sum(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found_and_its_cost_is_within_a_point_of_the_truth(name: str) -> None:
    fault = FAULTS[name]
    loop = fault.change(CLEAN)
    report = measure(loop, fault)
    assert report.stall == pytest.approx(truth(loop, fault).idle, abs=POINT)
    assert max(report.causes, key=lambda cause: report.causes[cause].fraction) == fault.cause
    assert_parts_sum(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAULTS) - {"tiny kernels"}))
def test_without_a_fault_the_run_gains_what_was_predicted(name: str) -> None:
    fault = FAULTS[name]
    loop = fault.change(CLEAN)
    predicted = measure(loop, fault).causes[fault.cause].speed_up
    mended = replace(CLEAN, data_seconds=min(loop.data_seconds, 2e-3))
    gained = truth(loop, fault).seconds / truth(mended).seconds
    assert predicted == pytest.approx(gained, rel=0.1)


def test_a_device_that_is_never_kept_waiting_has_no_stall() -> None:
    loop = replace(SHORT, log_every=10**6)
    report = measure(loop)
    assert report.stall is not None
    assert report.stall < 0.002
    assert report.advice == []


@pytest.mark.parametrize("pause", [0.0, 10.0, 30.0])
@pytest.mark.parametrize("drift", [-1e-4, 2e-6, 5e-6, 1e-4])
def test_launch_stall_is_found_at_any_drift_and_pause(drift: float, pause: float) -> None:
    loop = replace(FEW["launch-bound"], steps=60, drift=drift, pause_seconds=pause)
    report = measure(loop)
    assert report.stall == pytest.approx(truth(loop).idle, abs=POINT)
    assert max(report.causes, key=lambda cause: report.causes[cause].fraction) == "launch"


def covered(loop: Loop, seeds: range) -> int:
    count = 0
    for seed in seeds:
        report = measure(loop, seed=seed)
        assert report.interval is not None
        low, high = report.interval
        count += low <= truth(loop, seed=seed).idle <= high
    return count


@pytest.mark.parametrize("regime", FEW)
def test_the_interval_holds_the_truth_of_most_runs(regime: str) -> None:
    assert covered(FEW[regime], range(6)) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("regime", FEW)
def test_the_interval_holds_the_truth_in_at_least_nine_of_ten_runs(regime: str) -> None:
    assert covered(FEW[regime], range(60)) >= 54


def test_without_calibration_the_stall_inside_work_is_bounded_and_named_as_unseen() -> None:
    loop = replace(REGIMES["launch-bound"], steps=50)
    run = Run(loop, None, 0, metered=True)
    run.meter = StallMeter(clock=run.device, skipped_steps=WARMUP, calibrate=False)
    run.all_steps()
    report = run.meter.report()
    assert report.stall is not None
    assert report.at_most is not None
    assert report.stall < truth(loop).idle < report.at_most
    assert "unseen" in {piece.cause for piece in report.advice}


def test_where_the_host_waits_inside_the_work_its_lines_are_looked_for_once() -> None:
    fault = FAULTS["item in every micro-batch"]
    run = Run(fault.change(CLEAN), fault, 0, metered=True)
    run.all_steps()
    assert run.meter is not None
    assert run.meter._waits.has_looked
    assert not run.meter._waits.is_looking
    clean = Run(SHORT, None, 0, metered=True)
    clean.all_steps()
    assert clean.meter is not None
    assert not clean.meter._waits.has_looked
