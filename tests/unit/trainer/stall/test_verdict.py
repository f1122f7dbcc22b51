"""Verdict, reason, next step and advice, and the late rank: from figures alone."""

import dataclasses
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sleeping import Sleeping
from torch.utils.data import DataLoader

from tokenfeed.trainer.report.page import RunData, page_of
from tokenfeed.trainer.stall import StallMeter
from tokenfeed.trainer.stall.causes import ABOUT, CAUSES, REMEDIES, Cause
from tokenfeed.trainer.stall.ranks import rank_stalls, slowest_rank
from tokenfeed.trainer.stall.stall_report import (
    CauseReport,
    RunTimes,
    Sample,
    Samples,
    StallReport,
)
from tokenfeed.trainer.stall.verdict import conclude
from tokenfeed.trainer.stall.watchers import Loader

OWN = tuple(cause for cause in CAUSES if cause != "communication")


def report_of(
    causes: dict[Any, float] | None = None, *, seconds: float = 10.0, **changes: Any
) -> StallReport:
    """A report on 100 steps with shares of the time by cause, before its conclusions."""
    shares = dict.fromkeys(CAUSES, 0.0) | (causes or {})
    parts = {
        cause: CauseReport(fraction=share, seconds=share * seconds, interval=None, speed_up=1.0)
        for cause, share in shares.items()
    }
    stall = sum(shares.values())
    values: dict[str, Any] = {
        "stall": stall,
        "interval": None,
        "at_most": stall,
        "causes": parts,
        "steps": 100,
        "queued_steps": 105,
        "seconds": seconds,
        "tokens": 0,
        "real_tokens_per_s": None,
        "padding": None,
        "mfu": None,
        "mfu_formula": None,
        "core_wait": 0.0,
        "device": "a device",
        "on_gpu": True,
        "method": "by hand",
        "events": {},
        "ranks": [],
        "slowest_rank": None,
        "advice": [],
    }
    return StallReport(**values | changes)


def lines_of(report: StallReport, **settings: Any) -> dict[str, str]:
    """The report as text, by the name of each line."""
    found = re.findall(r"^(\S+) +(.*(?:\n .*)*)", str(conclude(report, **settings)), re.MULTILINE)
    return dict(found)


# ---------- verdict, reason, next step ----------
@pytest.mark.parametrize("cause", CAUSES)
def test_report_begins_with_verdict_reason_and_next_step(cause: Cause) -> None:
    report = conclude(report_of({cause: 0.2}), {cause: "raise `eval_interval` (train.py:263)"})
    first, second, third = str(report).splitlines()[:3]
    assert first == f"verdict  {ABOUT[cause].verdict}"
    assert second.startswith(f"reason   {ABOUT[cause].activity} 20.0% of 100.0 ms a step (2.0 s of")
    if cause == "communication":
        return  # what to change depends on the ranks
    assert third.startswith("next     raise `eval_interval` (train.py:263)")
    assert third.endswith(": up to 25.0% faster")


@pytest.mark.parametrize("cause", CAUSES)
def test_cause_below_its_threshold_is_neither_verdict_nor_advice(cause: Cause) -> None:
    named = ABOUT[cause].named
    below, above = (conclude(report_of({cause: x * named})) for x in (0.99, 1.01))
    assert below.verdict == "THE DEVICE IS BUSY"
    assert below.advice == []
    assert above.verdict == ABOUT[cause].verdict
    assert above.advice[0].gain == pytest.approx(1 / (1 - 1.01 * named) - 1)


WHY = "another profiler is running"
NOTHING: dict[str, Any] = {"stall": None, "at_most": None, "steps": 0}
RUN = RunTimes(total=38.2, before=9.1, warmup=1.2, after=1.9, after_by_cause={"evaluation": 0.1})
GOES_ON = dataclasses.replace(RUN, finished=False)
TIMES = (
    "38.2 s: 9.1 s to the end of the first step, 1.2 s of warm-up, 26.0 s of 100 measured steps, "
    "1.9 s after the last (evaluation 0.1)\n"
)
BUSY, CORES = "THE DEVICE IS BUSY", "SHORT OF CORES"


def says(verdict: str, *parts: str, **figures: Any) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """Expect a verdict, and these parts of the text, for causes and other figures."""
    return verdict, parts, figures


@pytest.mark.parametrize(
    ("verdict", "parts", "figures"),
    [
        says("WAITS FOR DATA AND EVALUATION", "(3.8 s of 10.0 s)", data=0.2, evaluation=0.18),
        says("THE HOST IS LATE AND WAITS FOR DATA", launch=0.20, data=0.18),
        says("WAITS FOR DATA", data=0.20, evaluation=0.12),
        says(BUSY, "largest cause of stall is data, 4.50%", data=0.045, log=0.005),
        says("WAITS FOR DATA", ": up to 4.7% faster\n", data=0.045, allocator=0.03, launch=0.029),
        says("WAITS FOR EVALUATION", "meanwhile, but does not train", evaluation=0.25, data=0.02),
        says("WAITS FOR EVALUATION", "; without evaluation 2.00%\n", evaluation=0.25, data=0.02),
        says(BUSY, f"{REMEDIES['padding']}: up to 33.3% faster", padding=0.25),
        says(BUSY, "data, 0.40%", "nothing to gain from faster feeding", data=0.004),
        says(BUSY, "the work takes 100.0% of 100.0 ms a step\nnext     look at kernels", mfu=0.1),
        says("ON A CPU THE WORK ITSELF TAKES THE TIME", "next     use a GPU", on_gpu=False),
        says("WAITS FOR DATA", data=0.3, on_gpu=False),
        says(CORES, "got no core for 66% of the time", core_wait=0.66, on_gpu=False),
        says(CORES, "beside that, evaluating", evaluation=0.2, core_wait=0.66, on_gpu=False),
        says(CORES, "threads: up to 2.9 times as fast\n", log=0.1, core_wait=0.66, on_gpu=False),
        says("WAITS FOR EVALUATION", evaluation=0.1, core_wait=0.15),
        says("WAITS FOR DATA", "got no core for 30% of the time", data=0.8, core_wait=0.3),
        says(BUSY, "end other processes", core_wait=0.66),
        says("HARDLY WAITS OUTSIDE OF THE WORK", f"; inside, {WHY}\n", data=0.01, unmeasured=WHY),
        says("WAITS FOR DATA", "takes at least 20.0% of", data=0.2, unmeasured=WHY),
        says("WAITS FOR LOGGING", f"inside   not measured: {WHY}.", log=0.1, unmeasured=WHY),
        says("NOT MEASURED", "no step has ended", queued_steps=0, run=RUN, **NOTHING),
        says("NOT MEASURED", "run      38.2 s\n", queued_steps=0, run=RUN, **NOTHING),
        says("NOT MEASURED", "3 steps so far, all of them warm-up\n", queued_steps=3, **NOTHING),
        says("NOT MEASURED", f"reason   {WHY}\n", unmeasured=WHY, **NOTHING),
        says("WAITS FOR DATA", TIMES, data=0.2, seconds=26.0, run=RUN),
        says(BUSY, "38.2 s so far: 9.1 s to", run=GOES_ON),
        says(ABOUT["wait"].verdict, "b.py:5 (4 a step)", wait=0.2, events={"waits": {"b.py:5": 4}}),
    ],
)
def test_report_says_what_its_figures_mean(
    verdict: str, parts: tuple[str, ...], figures: dict[str, Any]
) -> None:
    causes = {name: figures.pop(name) for name in CAUSES if name in figures}
    report = conclude(report_of(causes, **figures))
    assert report.verdict == verdict
    for part in parts:
        assert part in str(report)
    assert ("without evaluation" in str(report)) == ("evaluation" in causes)
    assert "--" not in report.next_step, "of a loop that is not ours"


def test_uncertain_cause_is_not_the_verdict() -> None:
    report = report_of({"data": 0.2})
    data = dataclasses.replace(report.causes["data"], interval=(0.0, 0.5))
    report = conclude(dataclasses.replace(report, causes={**report.causes, "data": data}))
    assert (report.verdict, report.advice) == ("THE DEVICE IS BUSY", [])
    causes = report.causes | {"log": dataclasses.replace(data, interval=(0.1, 0.3))}
    assert conclude(dataclasses.replace(report, causes=causes)).verdict == "WAITS FOR LOGGING"


Shares = st.floats(0.0, 1.0)


@given(
    idle=st.lists(
        st.lists(Shares, min_size=len(CAUSES), max_size=len(CAUSES)), min_size=1, max_size=5
    ),
    work=Shares,
    core_wait=st.none() | Shares,
    unmeasured=st.none() | st.just("the reason"),
    padding=st.none() | st.floats(0.0, 0.99),
    on_gpu=st.booleans(),
    certain=st.booleans(),
)
def test_every_report_has_a_verdict_that_its_figures_bear_out(
    idle: list[list[float]], work: float, certain: bool, **changes: Any
) -> None:
    told = [figures(work=work, **dict(zip(CAUSES, each, strict=True))) for each in idle]  # type: ignore[arg-type]
    report = on_ranks(*told, **changes)
    causes = {
        cause: dataclasses.replace(part, interval=(0.9 * part.fraction * certain, part.fraction))
        for cause, part in report.causes.items()
    }
    report = conclude(dataclasses.replace(report, causes=causes))
    assert "" not in (report.verdict, report.reason, report.next_step)
    assert not re.search(r"None|nan|inf\b|\{", str(report))
    late, share = report.slowest_rank, {c: part.fraction for c, part in causes.items()}
    if report.verdict == "SHORT OF CORES":
        assert changes["core_wait"] >= 0.2
    elif report.verdict.startswith("WAITS FOR RANK"):
        assert late is not None
        assert (late.rank != 0, late.is_late) == (True, True)
    elif "BUSY" in report.verdict or "ITSELF" in report.verdict:
        assert not certain or max(share.values()) < 0.1
    elif certain:
        assert report.verdict.startswith(ABOUT[max(share, key=share.__getitem__)].verdict)


# ---------- advice ----------


@pytest.mark.parametrize(("num_workers", "needed"), [(0, 9), (2, 20), (None, 0)])
def test_next_step_counts_the_workers_that_hide_loading(
    num_workers: int | None, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenfeed.trainer.stall.watchers.usable_cores", lambda: 64)
    loader, report = Loader("Loader", num_workers, "train.py:20"), report_of({"data": 0.89})
    found = conclude(report, loader=loader).next_step
    setting = f"set `num_workers={needed}` in your Loader (train.py:20): up to"
    assert found.startswith(setting if needed else "use more workers")


@pytest.mark.parametrize(
    ("loader", "change"),
    [
        (
            Loader("Loader", 0, busy=0.1),
            "set `num_workers=9` in your Loader, more than the 2 cores, "
            "since its items wait more than they compute",
        ),
        (
            Loader("Loader", 1),
            "set `num_workers=10` in your Loader, more than the 2 cores, if its "
            "items wait more than they compute; else make items cheaper",
        ),
        (
            Loader("Loader", 0, busy=0.9),
            "set `num_workers=2` in your Loader, and make items cheaper"
            ": 9 workers would keep up, and there are 2 cores",
        ),
        (
            Loader("ShardLoader", 1, is_ours=True),
            "set `num_workers=2` in your ShardLoader, and give "
            "your ShardLoader more cores: 10 workers would keep up, and there are 2 cores",
        ),
        (
            Loader("ShardLoader", 2, prefetch=2, is_ours=True),
            "raise its `prefetch` from 2 to 4, and "
            "give your ShardLoader more cores: 20 workers would keep up, and there are 2 cores",
        ),
    ],
)
def test_advice_on_workers_beyond_the_cores_fits_the_loader(
    loader: Loader, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenfeed.trainer.stall.watchers.usable_cores", lambda: 2)
    assert conclude(report_of({"data": 0.89}), loader=loader).advice[0].change == change


def test_meter_finds_the_loader_behind_iterators_and_whether_it_computes() -> None:
    loader = DataLoader(Sleeping(20, 0.002))

    def steps() -> Iterator[Any]:
        yield from loader

    for batches in (loader, iter(loader), enumerate(loader), ((x, 1) for x in loader), steps()):
        meter = StallMeter("cpu", skipped_steps=0)
        for _ in meter.watch(batches):
            meter.step()
        assert meter.loader is not None
        assert (meter.loader.name, meter.loader.num_workers) == ("DataLoader", 0)
        assert meter.loader.busy is not None
        assert meter.loader.busy < 0.5, "it sleeps"
        meter.close()


# ---------- ranks ----------
def figures(
    steps: int = 10, *, work: float, communication: float = 0.0, **causes: float
) -> list[float]:
    """What a rank tells the others: its steps, its seconds, and idle seconds by cause."""
    idle = {"communication": communication} | causes
    seconds = work + sum(idle.values())
    return [steps, seconds, *(idle.get(cause, 0.0) for cause in CAUSES)]


def on_ranks(*told: list[float], rank: int = 0, first: int = 0, **changes: Any) -> StallReport:
    """The report of a rank, from the figures of all ranks."""
    steps, seconds, *causes = told[rank - first]
    ranks = rank_stalls(told, first)
    return conclude(
        report_of(
            {cause: idle / (seconds or 1) for cause, idle in zip(CAUSES, causes, strict=True)},
            seconds=seconds,
            steps=int(steps),
            rank=rank,
            world_size=len(told),
            ranks=ranks,
            slowest_rank=slowest_rank(ranks),
            **changes,
        )
    )


def test_late_rank_is_named_with_its_own_cause() -> None:
    told = (
        figures(work=5, communication=4, data=1),
        figures(work=5, communication=0, data=1, log=4),
        figures(work=6, communication=3, data=1),
    )
    report = on_ranks(*told)
    late = report.slowest_rank
    assert late is not None
    assert (late.rank, late.cause, late.hidden_seconds) == (1, "log", 0.0)
    assert late.step_seconds == late.cost == pytest.approx(0.4)  # more than rank 0
    assert report.verdict == "WAITS FOR RANK 1"
    assert report.next_step == "rank 1: log less often: up to 66.7% faster"
    assert [each.waited_seconds for each in report.ranks] == pytest.approx([4, 0, 3])
    report = on_ranks(*told, rank=1)
    assert report.verdict == "WAITS FOR LOGGING"
    assert report.reason.endswith("; other ranks wait for this rank, 400.0 ms a step")


def test_late_rank_is_named_although_the_others_wait_inside_their_work() -> None:
    """As in the backward pass of DDP, where no meter sees that a rank waits."""
    told = figures(work=0.997, data=0.003), figures(work=0.638, data=0.362)
    report = on_ranks(*told, on_gpu=False)
    late = report.slowest_rank
    assert late is not None
    assert (late.rank, late.cause) == (1, "data")
    assert late.step_seconds == late.hidden_seconds == pytest.approx(0.0359)
    assert report.verdict == "WAITS FOR RANK 1"
    assert report.reason == (
        "rank 1 keeps the others waiting: data, 35.9 ms a step more than the median rank (35.9% of "
        "a step); rank 0's work contains about 35.9 ms of waiting a step"
    )
    assert report.next_step.startswith("rank 1: use more workers")
    assert re.search(r"rank 0 +0.30% +in work", str(report))
    assert "of waiting a step" in page_of(RunData(folder=Path("run"), stall=report))
    report = on_ranks(*told, rank=1, on_gpu=False)
    assert report.verdict == "WAITS FOR DATA"
    assert report.reason.endswith("; rank 0 waits for this rank, 35.9 ms a step")


@pytest.mark.parametrize(("more", "is_late"), [(0.029, False), (0.031, True)])
def test_rank_is_late_from_three_percent_of_a_step(more: float, is_late: bool) -> None:
    others = [figures(work=1 - 0.1, data=0.1) for _ in range(3)]
    report = on_ranks(*others, figures(work=0.9 - more, data=0.1 + more))
    assert ("rank 3 keeps the others waiting: data" in report.rank_table()[0]) == is_late
    assert is_late or report.rank_table()[0].startswith("no rank keeps the others waiting")


LATE = figures(work=0.997, data=0.003), figures(work=0.638, data=0.362)
SLOW = figures(work=5, communication=5), figures(work=10)


@pytest.mark.parametrize(
    ("told", "rank", "first", "verdict", "reason", "next_step"),
    [
        (
            LATE,
            6,
            6,
            "WAITS FOR RANK 7",
            "rank 6's work contains about 35.9 ms",
            "rank 7: use more",
        ),
        (LATE, 7, 6, "WAITS FOR DATA", "; rank 6 waits for this rank, 35.9 ms a step", "use more"),
        (
            SLOW,
            0,
            0,
            "WAITS FOR RANK 1",
            "rank 1 keeps",
            f"rank 1: {REMEDIES['work']}: up to 2.0 t",
        ),
        (SLOW, 1, 0, "THE DEVICE IS BUSY", "; rank 0 waits for this rank, 500.0 ms", "nothing"),
    ],
)
def test_ranks_of_any_node_name_the_late_one(
    told: Any, rank: int, first: int, verdict: str, reason: str, next_step: str
) -> None:
    report = on_ranks(*told, rank=rank, first=first)
    assert (report.verdict, [each.rank for each in report.ranks]) == (verdict, [first, first + 1])
    assert reason in report.reason
    assert report.next_step.startswith(next_step)


@given(
    own=st.lists(
        st.lists(st.floats(0.0, 1.0), min_size=len(OWN), max_size=len(OWN)), min_size=2, max_size=9
    ),
    exchange=st.floats(0.0, 1.0),
    steps=st.lists(st.integers(1, 1000), min_size=9, max_size=9),
    is_hidden=st.booleans(),
)
def test_last_rank_is_named_wherever_the_others_wait(
    own: list[list[float]], exchange: float, steps: list[int], is_hidden: bool
) -> None:
    """The oracle: each step ends when the last rank is there, and the exchange is done. Ranks wait
    as communication, or inside the work."""
    longest = max(map(sum, own))
    told = []
    for count, idle in zip(steps, own, strict=False):
        waits = count * (longest - sum(idle) + exchange)
        seen = {"work": waits} if is_hidden else {"work": 0.0, "communication": waits}
        causes = {cause: count * each for cause, each in zip(OWN, idle, strict=True)}
        told.append(figures(count, **seen, **causes))  # type: ignore[arg-type]
    ranks = rank_stalls(told)
    found = slowest_rank(ranks)
    assert found is not None
    middle = sorted(map(sum, own))[(len(own) - 1) // 2]
    if longest - middle > 1e-6:  # else half of the ranks are equally late
        assert sum(own[found.rank]) == pytest.approx(longest)
    assert found.step_seconds == pytest.approx(longest - middle, abs=1e-6)
    hidden = found.step_seconds if is_hidden else 0.0
    assert found.hidden_seconds == pytest.approx(hidden, abs=1e-6)
    for rank, idle in zip(ranks, own, strict=True):
        waited = 0.0 if is_hidden else longest - sum(idle)
        assert rank.waited_seconds / rank.steps == pytest.approx(waited, abs=1e-6)


def test_advice_without_a_late_rank_is_about_the_exchange() -> None:
    equal = figures(work=5, communication=5)
    report = on_ranks(equal, equal)
    assert report.verdict == "WAITS FOR OTHER RANKS"
    assert "no rank is late" in report.next_step
    assert "meter.gather()" in conclude(report_of({"communication": 0.5})).next_step


@pytest.mark.parametrize(("logging_of_late", "gain"), [(0, None), (0.5, 0.05), (5, 0.25)])
def test_rank_that_waits_gains_only_what_the_late_rank_has_of_a_cause_too(
    logging_of_late: float, gain: float | None
) -> None:
    own = figures(work=5, communication=3, log=2)
    late = figures(work=10 - logging_of_late, communication=0, log=logging_of_late)
    gains = [piece.gain for piece in on_ranks(own, late).advice if piece.cause == "log"]
    assert gains == ([] if gain is None else [pytest.approx(gain, abs=0.003)])


def test_late_rank_is_unknown_before_every_rank_has_measured_a_step() -> None:
    assert rank_stalls([figures(work=5)]) == []
    assert slowest_rank([]) is None
    report = on_ranks(figures(work=5), figures(0, work=0))
    assert report.slowest_rank is None
    assert "is not known: some rank has not measured a step" in report.rank_table()[0]
    assert "The slowest rank is not known" in page_of(RunData(folder=Path("run"), stall=report))


def test_table_of_many_ranks_shows_the_slowest_and_the_page_all() -> None:
    report = on_ranks(*(figures(work=rank, communication=100 - rank, data=1) for rank in range(64)))
    lines = report.rank_table()
    assert lines[0].startswith("rank 63 keeps the others waiting: work, 3.20 s a step")
    assert re.findall(r"rank (\d+) ", "\n".join(lines[2:])) == [str(63 - n) for n in range(8)]
    assert lines[-1].endswith("and 56 more, which waited longer")
    page = page_of(RunData(folder=Path("run"), stall=report))
    assert len(re.findall(r"<tr><th>\d+", page)) == 64
    assert "<th>63 (late)</th>" in page
    alone = report_of()
    assert alone.rank_table() == []
    assert "Ranks" not in page_of(RunData(folder=Path("run"), stall=alone))


# ---------- samples ----------


def test_samples_of_a_long_loop_are_few_and_evenly_spread() -> None:
    def sample_at(step: int) -> Sample:
        return Sample(step=step, steps=step, seconds=step, tokens=0, causes={})

    samples = Samples()
    for step in range(1, 10_001):
        samples.add(sample_at(step))
    steps = [one.step for one in samples.read(sample_at(10_001))]
    distances = [after - before for before, after in pairwise([0, *steps[:-1]])]
    assert max(distances) <= 2 * min(distances)
    assert 32 <= len(steps) <= 65
    assert steps[-1] == 10_001
