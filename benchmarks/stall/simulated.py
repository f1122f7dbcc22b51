"""Does the interval of the stall hold the truth in random loops on a simulated device?

The truth is the idle share of the same loop without a meter. What would refute the meter: intervals
that hold the truth in less than 95 % of the loops, or less than 93 % of any kind of loops.

A loop has 800 steps and about 12 traces, like a run of several minutes. The schedule does not see
the time that traces take, or there would be no more than six.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.stall.device import Device, TracerFaults
from benchmarks.stall.loops import FAMILIES, WARMUP, Loop, Rank, draw, draw_new, run
from tokenfeed.trainer.stall import StallMeter

SLACK = 0.001
"""Share by which the truth may be outside of an interval. Runs with and without a meter differ."""
STEPS_PER_TRACE = 95


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the meter of one rank measured in a loop, and what is true. Shares of the time."""

    loop: Loop
    truth: dict[str, float]
    """Idle shares by cause."""
    stall: float
    interval: tuple[float, float]
    causes: dict[str, float]
    is_measured: bool

    @property
    def true_stall(self) -> float:
        """The idle share."""
        return sum(self.truth.values())

    @property
    def width(self) -> float:
        """The width of the interval."""
        return self.interval[1] - self.interval[0]

    @property
    def error(self) -> float:
        """The distance of the reported stall from the truth."""
        return abs(self.stall - self.true_stall)

    def holds(self, slack: float = SLACK) -> bool:
        """Return whether the interval holds the truth."""
        return self.interval[0] - slack <= self.true_stall <= self.interval[1] + slack

    def finds_main_cause(self) -> bool | None:
        """Return whether the main cause is right. None if no cause leads by a point, and by 3 %."""
        first, second = sorted([*self.truth.values(), 0.0, 0.0])[:-3:-1]
        if first < 0.03 or first - second < 0.01:
            return None
        main = max(self.causes, key=lambda cause: self.causes[cause])
        return self.truth.get(main) == first


def meter_of(device: Device, loop: Loop, *, has_tracer: bool = True, **faults: Any) -> StallMeter:
    """Return the meter of a simulated device, whose tracer has these faults."""
    if has_tracer:
        known = {"loss": loop.loss, "has_graphs": bool(loop.graphs)} | faults
        device.faults = TracerFaults(usual_seconds=STEPS_PER_TRACE * loop.seconds, **known)
    meter = StallMeter(clock=device, skipped_steps=WARMUP)
    meter.close()  # Python's own collector is not a part of the simulation
    return meter


def run_metered(loop: Loop, **faults: Any) -> list[Rank]:
    """Run a loop with a meter on each rank."""
    with mock.patch("tokenfeed.trainer.stall.meter.own_place", return_value=(0, loop.ranks)):
        return run(loop, partial(meter_of, loop=loop, **faults))


def judge(loop: Loop, **faults: Any) -> list[Judgement]:
    """Run a loop without and with a meter, and return the judgement of each rank."""
    truths = [rank.truth() for rank in run(loop)]
    found = []
    for truth, rank in zip(truths, run_metered(loop, **faults), strict=True):
        assert rank.meter is not None
        reading = rank.meter.read()
        judgement = Judgement(
            loop=loop,
            truth=truth,
            stall=reading.fraction,
            interval=reading.interval(),
            causes={str(cause): share for cause, share in reading.cause_fractions.items()},
            is_measured=reading.is_inside_measured,
        )
        found.append(judgement)
    return found


def judge_one(loop: Loop) -> Judgement:
    """Return the judgement of one rank."""
    found = judge(loop)
    return found[loop.seed % len(found)]


def judge_all(loops: Iterable[Loop], processes: int) -> Iterator[Judgement]:
    """Judge one rank of each loop, in order, in processes that yield to others."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(processes, initializer=os.nice, initargs=(10,)) as pool:
        yield from pool.map(judge_one, loops, chunksize=4)


def loops_of(usual: int, each_new: int, on_ranks: int, first: int = 0) -> list[Loop]:
    """Return random loops: some of the family that the method was chosen with, some new ones.

    A loop of 8 ranks takes seven times as long as a usual one. One of its ranks is judged.
    """
    counts = dict.fromkeys(FAMILIES, each_new) | {"8 ranks": on_ranks}
    loops = [draw(first + seed) for seed in range(usual)]
    return loops + [draw_new(name, first + at) for name in FAMILIES for at in range(counts[name])]


GROUPS: dict[str, Callable[[Loop], object]] = {
    "host": lambda loop: loop.regime,
    "speed": lambda loop: loop.speed,
    "batch fetched": lambda loop: loop.order,
    "sizes": lambda loop: loop.sizes,
    "heavier step": lambda loop: f"every {loop.heavy}" if loop.heavy else "none",
    "host stops": lambda loop: "in 1 % of steps" if loop.pauses else "never",
    "copies": lambda loop: "on a side stream" if loop.copy else "none",
    "`.item()`": lambda loop: "in each step" if loop.item else "never",
    "host speed": lambda loop: "sways" if loop.sways else "steady",
}
"""Kinds of loops of the usual family."""


def summaries(found: list[Judgement]) -> list[dict[str, Any]]:
    """Return the figures of all loops, of each family, and of each kind of usual loops."""
    usual = [each for each in found if each.loop.family == "usual"]
    new = [each for each in found if each.loop.family != "usual"]
    groups = {"all": found, "usual": usual, "new": new}
    for name in FAMILIES:
        groups[f"new: {name}"] = [each for each in new if each.loop.family == name]
    for kind, value_of in GROUPS.items():
        for value in sorted({str(value_of(each.loop)) for each in usual}):
            groups[f"{kind}: {value}"] = [
                each for each in usual if str(value_of(each.loop)) == value
            ]
    return [_summary(name, group) for name, group in groups.items() if group]


def _summary(name: str, found: list[Judgement]) -> dict[str, Any]:
    mains = [right for each in found if (right := each.finds_main_cause()) is not None]
    widths = np.array([100 * each.width for each in found])
    errors = np.array([100 * each.error for each in found])
    return {
        "case": f"simulated, {name}",
        "loops": len(found),
        "percent_held": _percent(each.holds() for each in found),
        "percent_held_within_a_point": _percent(each.holds(0.01) for each in found),
        "percent_measured": _percent(each.is_measured for each in found),
        "width": round(float(np.median(widths)), 2),
        "percent_under_3": _percent(widths < 3),
        "width_p90": round(float(np.quantile(widths, 0.9)), 2),
        "error": round(float(np.median(errors)), 2),
        "error_p95": round(float(np.quantile(errors, 0.95)), 2),
        "error_max": round(float(errors.max()), 2),
        "percent_main_cause": _percent(mains) if mains else None,
    }


def _percent(values: Iterable[bool]) -> float:
    return round(100 * float(np.mean([*values])), 1)


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the table of docs/benchmarks.md."""
    header = ["kind", "loops", "interval holds", "within 1 point", "width", "under 3"]
    header += ["error, median", "p95", "worst", "main cause right"]
    rows = [entry for entry in results if entry["case"].startswith("simulated")]
    return [header, *(_row(entry) for entry in rows)]


def _row(entry: dict[str, Any]) -> list[str]:
    main = entry["percent_main_cause"]
    return [
        entry["case"].removeprefix("simulated, "),
        f"{entry['loops']:,}",
        f"{entry['percent_held']:.1f}%",
        f"{entry['percent_held_within_a_point']:.1f}%",
        f"{entry['width']:.1f}",
        f"{entry['percent_under_3']:.0f}%",
        *(f"{entry[name]:.2f}" for name in ("error", "error_p95", "error_max")),
        "none" if main is None else f"{main:.0f}%",
    ]
