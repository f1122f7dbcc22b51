"""Several ranks in one report: who is late is known from what each has measured of itself."""

import contextlib
import json
from pathlib import Path

import pytest

from benchmarks.stall.device import Device, TracerFaults
from tokenfeed.trainer.report.compare import Comparison
from tokenfeed.trainer.report.page import RunData
from tokenfeed.trainer.stall import StallMeter, StallReport

WARMUP, STEPS = 5, 100
DATA, KERNELS, KERNEL, EXCHANGE = 0.5e-3, 100, 100e-6, 0.3e-3


class Ranks:
    """Loops on simulated devices, which add up their gradients in each step."""

    def __init__(self, late: int) -> None:
        self.late = late
        self.devices = [Device(rank, launch=8e-6) for rank in range(3)]
        self.meters = [StallMeter(clock=each, skipped_steps=WARMUP) for each in self.devices]
        for meter in self.meters:
            meter.close()  # the simulation has no garbage collection

    def step(self, number: int, fault: str) -> None:
        outers = []
        for rank, (device, meter) in enumerate(zip(self.devices, self.meters, strict=True)):
            is_late = rank == self.late
            with meter.cause("data"):
                device.host += 20e-3 if is_late and fault == "data" else DATA
            device.kernels(KERNELS, KERNEL * (1.5 if is_late and fault == "work" else 1.0))
            outers.append(meter.enter("communication"))
        end = max(device.free for device in self.devices) + EXCHANGE
        behind = max(device.host for device in self.devices)
        for rank, (device, meter) in enumerate(zip(self.devices, self.meters, strict=True)):
            device.hold(end - EXCHANGE, end, "communication")
            meter.leave(outers[rank])
            device.kernels(10, KERNEL)
            meter.step(1000)
            device.host = max(device.host, behind)  # for what ranks told before
            if rank == self.late and fault == "log" and number % 5 == 0:
                with meter.cause("log"):
                    device.wait()
                    device.host += 50e-3

    def reports(self) -> list[StallReport]:
        said: list[list[float]] = []
        for meter in self.meters:
            meter.gather(lambda numbers: said.append(numbers) or said)  # type: ignore[func-returns-value]
        for meter in self.meters:
            meter.gather(lambda _: said)
        return [meter.report() for meter in self.meters]


def seconds_a_step(fault: str) -> float:
    """Of the same loops, on the clock of a device that nobody asks."""
    ranks, begun = Ranks(late=1), 0.0
    for number in range(1, WARMUP + STEPS + 1):
        ranks.step(number, fault)
        begun = ranks.devices[0].free if number == WARMUP else begun
    return (ranks.devices[0].free - begun) / STEPS


@pytest.mark.parametrize("fault", ["data", "work", "log"])
def test_of_simulated_devices_the_late_one_is_named_with_its_cause_and_its_cost(fault: str) -> None:
    late = 0
    ranks = Ranks(late)
    for number in range(1, WARMUP + STEPS + 1):
        ranks.step(number, fault)
    truth = seconds_a_step(fault) - seconds_a_step("none")
    for own, report in enumerate(ranks.reports()):
        found = report.slowest_rank
        assert found is not None
        assert (found.rank, found.cause) == (late, fault)
        assert found.step_seconds == pytest.approx(truth, rel=0.1)
        waited = report.ranks[own].waited_seconds / report.ranks[own].steps
        assert waited == pytest.approx(0.0 if own == late else truth, rel=0.1, abs=2e-4)
        assert f"rank {late} keeps the others waiting: {fault}" in str(report)


def test_of_simulated_devices_that_are_alike_none_is_called_late() -> None:
    ranks = Ranks(late=0)
    for number in range(1, WARMUP + STEPS + 1):
        ranks.step(number, "none")
    for report in ranks.reports():
        assert report.slowest_line.startswith("no rank keeps the others waiting")
        assert report.causes["communication"].seconds / report.steps > 0.9 * EXCHANGE


def test_what_follows_a_meeting_of_the_ranks_is_work_and_what_follows_their_talk_is_not() -> None:
    """Ranks meet before the work of each step, and exchange what they have measured."""

    def train(device: Device, meter: StallMeter | None) -> tuple[float, float]:
        begun = device.free, device.lost
        for step in range(WARMUP + 150):
            if step == WARMUP:
                begun = device.free, device.lost
            with meter.cause("communication") if meter else contextlib.nullcontext():
                device.kernels(1, EXCHANGE)
            device.kernels(KERNELS, 10e-6)
            if meter:
                meter.step(1000)
                meter.gather()
        device.wait()
        return device.free - begun[0], device.lost - begun[1]

    seconds, idle = train(Device(launch=18e-6, mark_seconds=0.0), None)
    device = Device(launch=18e-6)
    device.faults = TracerFaults(usual_seconds=0.5)
    meter = StallMeter(clock=device, skipped_steps=WARMUP)
    train(device, meter)
    report, met = meter.report(), 150 * EXCHANGE / seconds
    meter.close()
    assert report.causes["communication"].fraction == pytest.approx(met, rel=0.1)
    assert report.stall == pytest.approx(idle / seconds + met, abs=0.02)
    assert report.causes["launch"].fraction > 0.05


def test_a_loop_that_is_alone_in_the_end_keeps_what_ranks_told_before() -> None:
    meter = StallMeter(clock=Device(launch=8e-6), skipped_steps=0)
    meter.gather(lambda numbers: [numbers, numbers])
    before = meter.report().ranks
    meter.gather()  # the group is gone
    assert len(before) == 2
    assert meter.report().ranks == before


def test_report_of_one_rank_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = Device(launch=8e-6)
    meter = StallMeter(clock=device, skipped_steps=0)
    monkeypatch.setattr("tokenfeed.trainer.stall.meter.own_place", lambda: (3, 8))
    device.kernels(10, KERNEL)
    meter.step(1)
    device.wait()
    report = meter.report()
    assert (report.rank, report.world_size, report.ranks) == (3, 8, [])
    assert ", 1 step, rank 3 of 8" in str(report)
    assert ", 1 step, rank 3 of 8" in report.write(tmp_path).read_text()
    assert RunData.of_folder(tmp_path).stall.world_size == 8


def test_speed_of_one_rank_is_labelled_until_the_ranks_gather(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tokenfeed.trainer.stall.meter.own_place", lambda: (0, 2))
    device, shared = Device(launch=8e-6), Device(launch=8e-6)
    meter = StallMeter(clock=device, skipped_steps=0)
    of_all = StallMeter(clock=shared, skipped_steps=0, devices=2)
    for clock, each in ((device, meter), (shared, of_all)):
        clock.kernels(10, KERNEL)
        each.step(90, 100)
        clock.wait()
    own = meter.report().real_tokens_per_s
    assert f"speed    {own:,.0f} real tok/s on rank 0, padding 10.00% on rank 0" in str(
        meter.report()
    )
    assert f"speed    {own:,.0f} real tok/s, padding 10.00%\n" in str(of_all.report())
    meter.gather(lambda numbers: [numbers, numbers])
    both = f"{2 * own:,.0f}"
    report = meter.report()
    assert f"speed    {both} real tok/s on all 2 ranks, {own:,.0f} real tok/s on rank 0" in str(
        report
    )
    page = report.write(tmp_path).read_text()
    assert f"real tokens a second on all 2 ranks</span><b>{both}<" in page
    assert f"real tokens a second on rank 0</span><b>{own:,.0f}<" in page
    figures = json.loads((tmp_path / "report.json").read_text())["stall"]
    assert (figures["real_tokens_per_s"], figures["all_tokens_per_s"]) == (own, 2 * own)
    speed = Comparison.of(tmp_path, tmp_path).rows[-2]
    assert (speed.name, speed.a) == ("real tokens/s", pytest.approx(2 * own))
