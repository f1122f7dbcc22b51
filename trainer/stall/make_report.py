"""Make a report from the accounts of a meter, with advice on what to change and what it gains."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenfeed.pipeline.feeding.placement import usable_cores
from tokenfeed.trainer.stall.accounts import Accounts
from tokenfeed.trainer.stall.causes import ABOUT, CAUSES, Cause
from tokenfeed.trainer.stall.device import MeteredDevice
from tokenfeed.trainer.stall.reading import RankStall, SlowestRank, StallReading, slowest_rank
from tokenfeed.trainer.stall.stall_report import Advice, CauseReport, Interval, StallReport
from tokenfeed.trainer.stall.watchers import LoaderUse

REMEDIES: dict[str, str] = {
    **{cause: about.remedy for cause, about in ABOUT.items()},
    "work": "its work takes longer: check the clock, the temperature and the neighbours of its "
    "device",
    "exchange": "most of it is the exchange of gradients, not a late rank: exchange them less "
    "often, by steps of more micro-batches, or use a faster network",
    "padding": "pack rows, or sort more of them by length",
}
"""Advice by cause, and about other things that cost tokens."""
_MUCH_PADDING = 0.10
_LOW_MFU = 0.30
_LITTLE_STALL = 0.02
_MUCH_UNSEEN = 0.05
_MUCH_CORE_WAIT = 0.10
_SPARE = 1.1
"""Workers to advise, divided by the workers that would just keep up."""


def advise(
    report: StallReport, remedies: Mapping[str, str] | None = None, loader: LoaderUse | None = None
) -> list[Advice]:
    """Return advice on a report, largest gain first.

    A cause whose interval reaches 0 gets no advice.

    Args:
        report: The report.
        remedies: Advice of this loop by cause, instead of the general advice. Further keys: `work`,
            `exchange` and `padding`.
        loader: The loader that the loop waits for.
    """
    if report.stall is None:
        return []
    known = REMEDIES | dict(remedies or {})
    if loader is not None and loader.num_workers is not None:
        waiting = report.causes["data"].fraction
        known["data"] = _loader_remedy(loader, loader.num_workers, waiting)
    found = [*_on_causes(report, known), *_beside_stall(report, report.stall, known["padding"])]
    return sorted(found, key=lambda piece: -(piece.gain or 0.0))


def _on_causes(report: StallReport, remedies: Mapping[str, str]) -> Iterator[Advice]:
    for cause, about in ABOUT.items():
        fraction, felt = report.causes[cause].fraction, _felt(cause, report)
        weighed = fraction if cause == "communication" else felt
        interval = report.causes[cause].interval
        if weighed < about.named or (interval is not None and interval[0] <= 0.0):
            continue  # too small, or not distinguishable from no stall
        remedy = _remedy(cause, report, remedies)
        text = f"{cause} {fraction:.1%}: {remedy}{_lines(cause, report)}"
        gain = felt / max(1e-9, 1 - felt)
        yield Advice(cause=cause, text=text, gain=gain)


def _loader_remedy(loader: LoaderUse, num_workers: int, waiting: float) -> str:
    """Return advice on the number of workers that would keep up.

    Example: without workers, a loader takes 91 % of a loop's time. Each batch then trains for the
    other 9 %, so 91 / 9 = 10.1 workers would just keep up, and 12 are advised.
    """
    busy = num_workers or loader.share
    needed = max(num_workers + 1, math.ceil(_SPARE * busy / max(1e-9, 1 - waiting) - 1e-9))
    cost = ""
    if not num_workers:
        items = loader.batch_size or 1
        of = "an item" if loader.batch_size else "a batch"
        cost = f" {of} costs {loader.batch_seconds / items * 1e3:.1f} ms;"
    text = f"your {loader.name} has num_workers={num_workers}:{cost}"
    text += f" {needed:,} {'worker' if needed == 1 else 'workers'} would hide it"
    if needed > (cores := usable_cores()):
        text += f", but this process has {cores} cores: also make items cheaper"
    return text


def _felt(cause: Cause, report: StallReport) -> float:
    """Return the share of the time that a run saves without a cause.

    If a rank is late, this is at most the rank's own share of the cause: whatever the other ranks
    save, they wait longer for the late one. For communication, the exchange of gradients stays.
    """
    fraction, late = report.causes[cause].fraction, _late(report)
    if late is None:
        return fraction
    waited_for = report.ranks[late.rank]
    own = waited_for.causes.get(cause, 0.0) / waited_for.seconds
    return min(fraction, late.cost if cause == "communication" else own)


def _remedy(cause: Cause, report: StallReport, remedies: Mapping[str, str]) -> str:
    """Return what to change about a cause. For communication, what makes the slowest rank
    faster."""
    if cause != "communication" or report.slowest_rank is None:
        return remedies[cause]
    late = _late(report)
    if late is None:
        return remedies["exchange"]
    return f"rank {late.rank} is late by {late.cause}: {remedies[late.cause]}"


def _late(report: StallReport) -> SlowestRank | None:
    """Return the rank that causes most of the communication by being late; None without one."""
    slowest = report.slowest_rank
    if slowest is None or slowest.cost < 0.5 * report.causes["communication"].fraction:
        return None
    return slowest


def _lines(cause: Cause, report: StallReport) -> str:
    """Return the source lines at which the host waits, if they were looked for."""
    if cause != "wait":
        return ""
    waits: dict[str, float] = report.events.get("waits", {})
    if not waits:
        return "; `meter.find_waits()` names the lines"
    return "; " + ", ".join(f"{line} ({count:g} a step)" for line, count in list(waits.items())[:3])


def _beside_stall(report: StallReport, stall: float, padding_remedy: str) -> Iterator[Advice]:
    """Yield advice on costs in tokens per second other than stall."""
    if report.core_wait is not None and report.core_wait >= _MUCH_CORE_WAIT:
        yield Advice(
            cause="cores",
            text=f"the training thread was ready to run but got no core for {report.core_wait:.0%} "
            f"of the time ({usable_cores()} cores): other processes or too many workers use them",
            gain=None if report.on_gpu else report.core_wait / max(1e-9, 1 - report.core_wait),
        )
    if report.padding is not None and report.padding >= _MUCH_PADDING:
        yield Advice(
            cause="padding",
            text=f"padding {report.padding:.0%}: {padding_remedy}",
            gain=report.padding / (1 - report.padding),
        )
    if report.at_most is not None and report.at_most - stall >= _MUCH_UNSEEN:
        text = f"{report.at_most - stall:.0%} may be idle inside the work: "
        if report.events.get("waits"):
            text += "the host waits for the device in the middle of it, at "
            text += _lines("wait", report).removeprefix("; ")
            text += ": remove the wait, or put it into `with meter.cause('wait')` to measure it"
        else:
            text += "run more steps, or set `meter.mark()` between forward and backward"
        yield Advice(cause="unseen", text=text, gain=None)
    if report.mfu is not None and report.mfu < _LOW_MFU and stall < _LITTLE_STALL:
        yield Advice(
            cause="kernels",
            text=f"MFU {report.mfu:.0%} with hardly any stall: feeding is not the problem; look at "
            "kernels, precision and the size of micro-batches",
            gain=None,
        )


_LEAST_ERROR = 0.001
"""Error from latencies and rounding, as a share of the time; measured on the simulated device."""


def make_report(
    reading: StallReading,
    accounts: Accounts,
    machine: MeteredDevice,
    *,
    events: dict[str, Any],
    place: tuple[int, int],
    ranks: Sequence[RankStall],
    queued_steps: int,
    core_wait: float | None,
    loader: LoaderUse | None,
    remedies: Mapping[str, str],
) -> StallReport:
    """Make a report from a reading, with the percentiles and error bars of its accounts.

    Args:
        reading: Sums of the measured steps.
        accounts: The accounts behind the reading.
        machine: The device.
        events: Counts of events.
        place: The rank of this process, and the number of ranks.
        ranks: The stall of each rank, if there are several.
        queued_steps: Calls of `step`, warm-up included.
        core_wait: Share of the time in which the training thread got no core.
        loader: The loader that the loop waits for.
        remedies: Advice of this loop by cause, instead of the general advice.
    """
    seconds, tokens_per_s = reading.seconds, reading.tokens_per_s
    total = reading.fraction if reading.steps else None
    unseen = reading.unseen_seconds / seconds if seconds else 0.0
    mfu, formula = _mfu(machine, tokens_per_s)
    report = StallReport(
        stall=total,
        interval=_interval(None, reading, accounts, unseen),
        at_most=None if total is None else min(1.0, total + unseen),
        causes={cause: _cause(cause, reading, accounts) for cause in CAUSES},
        steps=reading.steps,
        queued_steps=queued_steps,
        seconds=seconds,
        tokens=reading.tokens,
        real_tokens_per_s=tokens_per_s if reading.tokens else None,
        padding=1 - reading.tokens / reading.slots if reading.slots else None,
        mfu=mfu,
        mfu_formula=formula,
        core_wait=core_wait,
        device=machine.name,
        on_gpu=machine.on_gpu,
        method=machine.clock.method,
        events=events,
        rank=place[0],
        world_size=place[1],
        ranks=[*ranks],
        slowest_rank=slowest_rank(ranks) if ranks else None,
        advice=[],
    )
    report.advice.extend(advise(report, remedies, loader))
    return report


def _cause(cause: Cause, reading: StallReading, accounts: Accounts) -> CauseReport:
    fraction, tail = reading.cause_fractions[cause], accounts.histograms.get(cause)
    quantiles = [tail.quantile(q, reading.steps) if tail else 0.0 for q in (0.5, 0.95, 0.99)]
    return CauseReport(
        fraction=fraction,
        seconds=reading.cause_seconds[cause],
        interval=_interval(cause, reading, accounts),
        p50_s=quantiles[0],
        p95_s=quantiles[1],
        p99_s=quantiles[2],
        max_s=tail.largest if tail else 0.0,
        speed_up=1 / max(1e-9, 1 - fraction),
    )


def _interval(
    cause: Cause | None, reading: StallReading, accounts: Accounts, unseen: float = 0.0
) -> Interval | None:
    """Return the interval of the share of a cause, or of all causes if None.

    Its width comes from the spread of the steps and of the reference spans (see `reading`). Its
    lower end is lowered by the time of the meter's marks, which may delay the device. Its upper end
    is raised by unseen idle time.
    """
    half_width = accounts.batches.half_width(cause)
    if not reading.seconds or half_width is None:
        return None
    fraction = reading.fraction if cause is None else reading.cause_fractions[cause]
    step_error = half_width * (1 - reading.counted_fraction)
    reference_error = reading.reference_error(cause) / reading.seconds
    either_side = math.hypot(step_error, reference_error, _LEAST_ERROR if fraction else 0.0)
    low = fraction - either_side - min(fraction, reading.marking_seconds / reading.seconds)
    return max(0.0, low), min(1.0, fraction + either_side + unseen)


def _mfu(machine: MeteredDevice, tokens_per_s: float) -> tuple[float | None, str | None]:
    peak, operations = machine.peak_tflops, machine.operations_per_token
    if peak is None or operations is None or not tokens_per_s:
        return None, None
    formula = (
        f"{operations:.4g} operations per token x {tokens_per_s:,.0f} real tok/s / {peak:g} "
        f"TFLOP/s, dense half precision of {machine.name}"
    )
    return operations * tokens_per_s / (peak * 1e12), formula
