"""What to change, and what that gains: from a report. Empty when all is well."""

import math
from collections.abc import Iterator, Mapping

from tokenfeed.pipeline.feeding.cores import usable_cores
from tokenfeed.trainer.stall.causes import ABOUT, Cause
from tokenfeed.trainer.stall.ranks import SlowestRank
from tokenfeed.trainer.stall.report import Advice, StallReport
from tokenfeed.trainer.stall.watched import LoaderUse

__all__ = ["advise"]

_REMEDIES: dict[str, str] = {
    **{cause: about.remedy for cause, about in ABOUT.items()},
    "work": "its work takes longer: check the clock, the temperature and the neighbours of its "
    "device",
    "exchange": "most of it is the exchange of gradients, not a late rank: exchange them less "
    "often, by steps of more micro-batches, or use a faster network",
    "padding": "pack rows, or sort more of them by length",
}
"""What to do about each cause, and about what else costs tokens."""
_MUCH_PADDING = 0.10
_LOW_MFU = 0.30
_LITTLE_STALL = 0.02
_MUCH_UNSEEN = 0.05
_MUCH_CORE_WAIT = 0.10
_SPARE = 1.1
"""Workers to advise, divided by those that would just keep up."""


def advise(
    report: StallReport, remedies: Mapping[str, str] | None = None, loader: LoaderUse | None = None
) -> list[Advice]:
    """Advice on a report, the largest gain first.

    Args:
        report: The report.
        remedies: What this loop can do, by cause, instead of the general advice. Besides causes:
            `work`, `exchange` and `padding`.
        loader: The loader that the loop waits for.
    """
    if report.stall is None:
        return []
    known = _REMEDIES | dict(remedies or {})
    if loader is not None and loader.num_workers is not None:
        waiting = report.causes["data"].fraction
        known["data"] = _loader_remedy(loader, loader.num_workers, waiting)
    found = [*_on_causes(report, known), *_beside_stall(report, report.stall, known["padding"])]
    return sorted(found, key=lambda piece: -(piece.gain or 0.0))


def _on_causes(report: StallReport, remedies: Mapping[str, str]) -> Iterator[Advice]:
    for cause, about in ABOUT.items():
        fraction, felt = report.causes[cause].fraction, _felt(cause, report)
        weighed = fraction if cause == "communication" else felt
        if weighed < about.named:
            continue
        remedy = _remedy(cause, report, remedies)
        text = f"{cause} {fraction:.1%}: {remedy}{_lines(cause, report)}"
        gain = felt / max(1e-9, 1 - felt)
        yield Advice(cause=cause, is_severe=weighed >= about.severe, text=text, gain=gain)


def _loader_remedy(loader: LoaderUse, num_workers: int, waiting: float) -> str:
    """How many workers would keep up.

    Without workers, a loader that takes 91 % of a loop's time needs 10: the other 9 % are the time
    in which each batch is trained on.
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
    """The share of the time that is saved without a cause.

    If a rank is late, no more than its own share of the cause: whatever the others save, they wait
    longer for it. For communication, the exchange of gradients itself is not saved.
    """
    fraction, late = report.causes[cause].fraction, _late(report)
    if late is None:
        return fraction
    waited_for = report.ranks[late.rank]
    own = waited_for.causes.get(cause, 0.0) / waited_for.seconds
    return min(fraction, late.cost if cause == "communication" else own)


def _remedy(cause: Cause, report: StallReport, remedies: Mapping[str, str]) -> str:
    """What to change about a cause; about communication, what makes the slowest rank faster."""
    if cause != "communication" or report.slowest_rank is None:
        return remedies[cause]
    late = _late(report)
    if late is None:
        return remedies["exchange"]
    return f"rank {late.rank} is late by {late.cause}: {remedies[late.cause]}"


def _late(report: StallReport) -> SlowestRank | None:
    """The rank that causes most of the communication by being late, if there is one."""
    slowest = report.slowest_rank
    if slowest is None or slowest.cost < 0.5 * report.causes["communication"].fraction:
        return None
    return slowest


def _lines(cause: Cause, report: StallReport) -> str:
    """The source lines at which the host waits, if they were looked for."""
    if cause != "wait":
        return ""
    waits: dict[str, float] = report.events.get("waits", {})
    if not waits:
        return "; `meter.find_waits()` names the lines"
    return "; " + ", ".join(f"{line} ({count:g} a step)" for line, count in list(waits.items())[:3])


def _beside_stall(report: StallReport, stall: float, padding_remedy: str) -> Iterator[Advice]:
    """What costs tokens per second and is not a stall."""
    if report.core_wait is not None and report.core_wait >= _MUCH_CORE_WAIT:
        yield Advice(
            cause="cores",
            is_severe=report.core_wait >= 2 * _MUCH_CORE_WAIT,
            text=f"the training thread was ready to run but got no core for {report.core_wait:.0%} "
            f"of the time ({usable_cores()} cores): other processes or too many workers use them",
            gain=None if report.on_gpu else report.core_wait / max(1e-9, 1 - report.core_wait),
        )
    if report.padding is not None and report.padding >= _MUCH_PADDING:
        yield Advice(
            cause="padding",
            is_severe=report.padding >= 2 * _MUCH_PADDING,
            text=f"padding {report.padding:.0%}: {padding_remedy}",
            gain=report.padding / (1 - report.padding),
        )
    if report.at_most is not None and report.at_most - stall >= _MUCH_UNSEEN:
        yield Advice(
            cause="unseen",
            is_severe=False,
            text=f"{report.at_most - stall:.0%} may be idle inside the work: run more steps, or "
            "set `meter.mark()` between forward and backward",
            gain=None,
        )
    if report.mfu is not None and report.mfu < _LOW_MFU and stall < _LITTLE_STALL:
        yield Advice(
            cause="kernels",
            is_severe=False,
            text=f"MFU {report.mfu:.0%} with hardly any stall: feeding is not the problem; look at "
            "kernels, precision and the size of micro-batches",
            gain=None,
        )
