"""Several ranks in one report: who is late is known from what each has measured of itself."""

import dataclasses
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stall_device import SimulatedDevice
from support.stall_scenarios import REGIMES, Run

from tokenfeed.trainer.report.page import RunData, page_of
from tokenfeed.trainer.stall import CAUSES, StallMeter, StallReading, StallReport
from tokenfeed.trainer.stall.causes import Cause
from tokenfeed.trainer.stall.reading import numbers_of, rank_stalls, slowest_rank
from tokenfeed.trainer.stall.stall_report import advise, rank_table, slowest_line

WARMUP, STEPS = 5, 100
DATA, KERNELS, KERNEL, EXCHANGE = 0.5e-3, 100, 100e-6, 0.3e-3
OWN = tuple(cause for cause in CAUSES if cause != "communication")


def reading(steps: int = 10, *, work: float, communication: float, **gaps: float) -> StallReading:
    causes: dict[Cause, float] = {"communication": communication}
    causes.update(gaps)  # type: ignore[call-overload]
    seconds = work + sum(causes.values())
    return StallReading(steps=steps, tokens=10, slots=10, seconds=seconds, gaps=causes)


def told(*readings: StallReading) -> Any:
    return rank_stalls([numbers_of(each) for each in readings])


def test_the_slowest_rank_is_who_waits_least_for_the_others_and_its_own_cause_is_named() -> None:
    ranks = told(
        reading(work=5, communication=4, data=1),
        reading(work=5, communication=0, data=1, log=4),
        reading(work=6, communication=3, data=1),
    )
    found = slowest_rank(ranks)
    assert found is not None
    assert (found.rank, found.cause) == (1, "log")
    assert found.step_seconds == pytest.approx(0.4)
    assert found.cost == pytest.approx(0.4)
    assert [each.waited_seconds for each in ranks] == pytest.approx([4, 0, 3])


def test_one_rank_is_not_compared_and_one_without_a_step_is_waited_for() -> None:
    alone = reading(work=5, communication=0)
    assert told(alone) == []
    assert slowest_rank([]) is None
    assert slowest_rank(told(alone, reading(0, work=0, communication=0))) is None


@given(
    own=st.lists(
        st.lists(st.floats(0.0, 1.0), min_size=len(OWN), max_size=len(OWN)), min_size=2, max_size=9
    ),
    exchange=st.floats(0.0, 1.0),
    steps=st.lists(st.integers(1, 1000), min_size=9, max_size=9),
)
def test_ranks_that_wait_for_the_last_are_told_so_whatever_steps_their_meters_left_out(
    own: list[list[float]], exchange: float, steps: list[int]
) -> None:
    """The oracle: each step ends when the last rank is there, and the exchange is done."""
    longest = max(map(sum, own))
    readings = [
        reading(
            count,
            work=0.0,
            communication=count * (longest - sum(idle) + exchange),
            **{cause: count * each for cause, each in zip(OWN, idle, strict=True)},
        )
        for count, idle in zip(steps, own, strict=False)
    ]
    ranks = told(*readings)
    for rank, idle in zip(ranks, own, strict=True):
        waited = longest - sum(idle)
        assert rank.waited_seconds / rank.steps == pytest.approx(waited, abs=1e-6)
    found = slowest_rank(ranks)
    assert found is not None
    assert sum(own[found.rank]) == pytest.approx(longest)
    assert found.step_seconds == pytest.approx(longest - min(map(sum, own)), abs=1e-6)


class Ranks:
    """Loops on simulated devices, which add up their gradients in each step."""

    def __init__(self, late: int, seed: int = 0) -> None:
        self.late = late
        self.devices = [SimulatedDevice(seed + rank) for rank in range(3)]
        self.meters = [StallMeter(clock=each, skipped_steps=WARMUP) for each in self.devices]
        for meter in self.meters:
            meter.close()  # the simulation has no garbage collection

    def step(self, number: int, fault: str) -> None:
        outers = []
        for rank, (device, meter) in enumerate(zip(self.devices, self.meters, strict=True)):
            device.random = random.Random(1_000 * number + rank)
            is_late = rank == self.late
            with meter.cause("data"):
                device.host += 20e-3 if is_late and fault == "data" else DATA
            device.work(KERNELS, KERNEL * (1.5 if is_late and fault == "work" else 1.0))
            outers.append(meter.enter("communication"))
        end = max(device.done for device in self.devices) + EXCHANGE
        behind = max(device.host for device in self.devices)
        for rank, (device, meter) in enumerate(zip(self.devices, self.meters, strict=True)):
            device.compute_waits(end)
            meter.leave(outers[rank])
            device.work(10, KERNEL)
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
        begun = ranks.devices[0].done if number == WARMUP else begun
    return (ranks.devices[0].done - begun) / STEPS


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
        assert slowest_line(report) == "no rank keeps the others waiting"
        assert report.causes["communication"].seconds / report.steps > 0.9 * EXCHANGE


class Meeting(Run):
    """A loop on shares of weights: ranks meet before each micro-batch, and tell each other what
    they have measured at progress lines."""

    def micro_batch(self, step: int, part: int) -> None:
        with self.cause("communication"):
            self.device.launch(EXCHANGE)
        super().micro_batch(step, part)

    def finish(self, step: int) -> None:
        super().finish(step)
        if self.meter and step % 2 == 0:
            self.meter.gather()


def test_what_follows_a_meeting_of_the_ranks_is_work_and_what_follows_their_talk_is_not() -> None:
    loop = dataclasses.replace(REGIMES["launch-bound"], steps=150)
    metered, bare = Meeting(loop, None, 0, metered=True), Meeting(loop, None, 0, metered=False)
    for run in (metered, bare):
        run.all_steps()
    assert metered.meter is not None
    report, seconds = metered.meter.report(), bare.ended[0] - bare.begun[0]
    idle = (bare.ended[1] - bare.begun[1]) / seconds
    met = 2 * EXCHANGE * loop.steps / seconds
    assert report.causes["communication"].fraction == pytest.approx(met, rel=0.1)
    assert report.stall == pytest.approx(idle + met, abs=0.01)
    assert report.causes["launch"].fraction > 0.05


def waiting_report(ranks: Sequence[Any], communication: float) -> StallReport:
    """Of rank 0."""
    meter = StallMeter(clock=SimulatedDevice(), skipped_steps=0)
    blank = meter.report()
    part = dataclasses.replace(
        blank.causes["communication"], fraction=communication, speed_up=1 / (1 - communication)
    )
    causes = blank.causes | {"communication": part}
    slowest = slowest_rank(ranks)
    return dataclasses.replace(
        blank, stall=communication, causes=causes, ranks=[*ranks], slowest_rank=slowest
    )


def test_advice_to_who_waits_is_that_of_the_rank_that_is_waited_for() -> None:
    first = reading(work=5, communication=5)
    late = told(first, reading(work=5, communication=0, data=5))
    (piece,) = advise(waiting_report(late, 0.5))
    assert "rank 1 is late by data: batches come late" in piece.text
    assert piece.gain == pytest.approx(1.0)
    (piece,) = advise(waiting_report(told(first, reading(work=10, communication=0)), 0.5))
    assert "rank 1 is late by work: its work takes longer" in piece.text
    (piece,) = advise(waiting_report(told(first, first), 0.5))
    assert "not a late rank" in piece.text
    (piece,) = advise(waiting_report([], 0.5))
    assert "meter.gather()" in piece.text


@pytest.mark.parametrize(("logging_of_late", "gain"), [(0, None), (0.5, 0.05), (5, 0.25)])
def test_who_waits_gains_by_a_cause_of_its_own_only_what_the_late_rank_has_of_it_too(
    logging_of_late: float, gain: float | None
) -> None:
    own = reading(work=5, communication=3, log=2)
    late = reading(work=10 - logging_of_late, communication=0, log=logging_of_late)
    report = waiting_report(told(own, late), 0.3)
    log = dataclasses.replace(report.causes["log"], fraction=0.2, speed_up=1 / (1 - 0.2))
    found = advise(dataclasses.replace(report, causes=report.causes | {"log": log}))
    gains = [piece.gain for piece in found if piece.cause == "log"]
    assert gains == ([] if gain is None else [pytest.approx(gain, abs=0.003)])


def test_who_is_late_is_not_known_before_every_rank_has_measured_a_step() -> None:
    ranks = told(reading(work=5, communication=0), reading(0, work=0, communication=0))
    report = waiting_report(ranks, 0.5)
    assert "is not known: some rank has not measured a step" in rank_table(report)[0]
    assert "The slowest rank is not known" in page_of(RunData(folder=Path("run"), stall=report))


def test_a_table_of_many_ranks_shows_the_slowest_and_the_page_all() -> None:
    ranks = told(*(reading(work=rank, communication=100 - rank, data=1) for rank in range(64)))
    report = waiting_report(ranks, 0.5)
    lines = rank_table(report)
    assert lines[0].startswith("rank 63 keeps the others waiting: work, 6.30 s a step")
    assert re.findall(r"rank (\d+) ", "\n".join(lines[2:])) == [str(63 - n) for n in range(8)]
    assert lines[-1].endswith("and 56 more, which waited longer")
    page = page_of(RunData(folder=Path("run"), stall=report))
    assert len(re.findall(r"<tr><th>\d+", page)) == 64
    assert "<th>63 (late)</th>" in page
    alone = waiting_report([], 0.5)
    assert rank_table(alone) == []
    assert "Ranks" not in page_of(RunData(folder=Path("run"), stall=alone))


def test_a_loop_that_is_alone_in_the_end_keeps_what_ranks_told_before() -> None:
    meter = StallMeter(clock=SimulatedDevice(), skipped_steps=0)
    meter.gather(lambda numbers: [numbers, numbers])
    before = meter.report().ranks
    meter.gather()  # the group is gone
    assert len(before) == 2
    assert meter.report().ranks == before


def test_report_of_one_rank_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = SimulatedDevice()
    meter = StallMeter(clock=device, skipped_steps=0)
    monkeypatch.setattr("tokenfeed.trainer.stall.meter.own_place", lambda: (3, 8))
    device.work(10, KERNEL)
    meter.step(1)
    device.wait()
    report = meter.report()
    assert (report.rank, report.world_size, report.ranks) == (3, 8, [])
    assert ", 1 step, rank 3 of 8" in str(report)
    assert ", 1 step, rank 3 of 8" in report.write(tmp_path).read_text()
    assert RunData.of_folder(tmp_path).stall.world_size == 8
