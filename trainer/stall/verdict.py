"""The conclusions of a report: verdict, reason and next step, and advice with its gain."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from tokenfeed.pipeline.feeding.placement import usable_cores
from tokenfeed.pipeline.text import count_of
from tokenfeed.trainer.stall.causes import ABOUT, REMEDIES, Cause
from tokenfeed.trainer.stall.ranks import SlowestRank
from tokenfeed.trainer.stall.stall_report import (
    Advice,
    StallReport,
    gain_words,
    late_rank,
    not_measured,
    short,
    slowest_line,
)
from tokenfeed.trainer.stall.watchers import LoaderUse

_MUCH_STALL = 0.10
"""From this share on, the verdict names the largest cause, however small it is."""
_NEAR = 0.7
"""A second cause is named in the verdict if it takes this share of the largest one."""
_SHORT_OF_CORES = 0.20
"""Share of the time without a core from which this is the verdict."""
_MUCH_CORE_WAIT = 0.10
_MUCH_PADDING = 0.10
_LOW_MFU = 0.30
_LITTLE_STALL = 0.02
_MUCH_UNSEEN = 0.05
_SPARE = 1.1
"""Workers to advise, divided by the workers that would just keep up."""


def conclude(
    report: StallReport,
    remedies: Mapping[str, str] | None = None,
    loader: LoaderUse | None = None,
) -> StallReport:
    """Return a report with its verdict, its reason, the next step, and advice.

    Args:
        report: The report.
        remedies: What to change in this loop by name, instead of the general remedies. The names
            are those of `REMEDIES`.
        loader: The loader that the loop waits for.
    """
    known = general = REMEDIES | dict(remedies or {})
    if loader is not None and loader.num_workers is not None and report.steps:
        waiting = report.causes["data"].fraction
        known = general | {"data": _loader_remedy(loader, loader.num_workers, waiting)}
    found = advise(report, known)
    verdict, reason, next_step = _verdict(report, found, general)
    return dataclasses.replace(
        report, verdict=verdict, reason=reason, next_step=next_step, advice=found
    )


def _verdict(
    report: StallReport, found: list[Advice], remedies: Mapping[str, str]
) -> tuple[str, str, str]:
    """Return verdict, reason and next step.

    Args:
        report: The report.
        found: Its advice.
        remedies: Remedies for any rank, whatever this rank's own loader needs.
    """
    if report.stall is None:
        why = not_measured(report).removeprefix("not measured: ")
        return "NOT MEASURED", why, remedies["steps"]
    causes, late = main_causes(report), late_rank(report)
    of_cause = {piece.cause: piece for piece in found}
    verdict, reason = " AND ".join(_short_verdicts(causes)), _share_words(report, causes)
    named: Advice | None = of_cause.get(causes[0]) if causes else None
    share = report.causes[causes[0]].fraction if causes else 0.0
    is_waiting = late is not None and late.rank != report.rank
    if late and is_waiting and (not causes or late.cost >= _own_share(report, causes[0])):
        change = f"rank {late.rank}: {remedies[late.cause]}"
        named = Advice(cause="communication", text="", change=change, gain=_gain(late.cost))
        verdict, reason = f"WAITS FOR RANK {late.rank}", slowest_line(report)
        share = max(share, late.cost)
    elif not causes:
        named, verdict, reason = _without_cause(report, found)
    if late and late.rank == report.rank:
        reason += f"; {_others(report)} for this rank, {short(late.step_seconds)} a step"
    wait = report.core_wait or 0.0
    if wait >= _SHORT_OF_CORES and wait > share and (share or not report.on_gpu):
        reason = f"{_core_words(wait)}; beside that, {reason}"
        named, verdict = of_cause["cores"], "SHORT OF CORES"
    if named is None:
        return verdict, reason, "nothing to gain from faster feeding"
    return verdict, reason, _next(named)


def _next(piece: Advice) -> str:
    return piece.change if piece.gain is None else f"{piece.change}: {gain_words(piece.gain)}"


def main_causes(report: StallReport) -> list[Cause]:
    """Return the main cause of a stall, and a second one that is nearly as large; empty without a
    cause that is worth a name."""
    by_size = sorted(report.causes, key=lambda cause: -report.causes[cause].fraction)
    is_much = (report.stall or 0.0) >= _MUCH_STALL
    shares = {cause: report.causes[cause].fraction for cause in by_size[:2]}
    worth = [cause for cause in shares if is_much or shares[cause] >= ABOUT[cause].named]
    if not worth or not _is_certain(report, worth[0]):
        return []
    return [cause for cause in worth if shares[cause] >= _NEAR * shares[worth[0]]]


def _is_certain(report: StallReport, cause: Cause) -> bool:
    interval = report.causes[cause].interval
    return interval is None or interval[0] > 0.0


def _short_verdicts(causes: list[Cause]) -> Iterator[str]:
    """Yield the verdicts of causes: WAITS FOR DATA, then EVALUATION."""
    has_waited = False
    for cause in causes:
        verdict = ABOUT[cause].verdict
        yield verdict.removeprefix("WAITS FOR ") if has_waited else verdict
        has_waited |= verdict.startswith("WAITS FOR ")


def _share_words(report: StallReport, causes: list[Cause]) -> str:
    """Return the reason: "evaluating takes 11.1% of 93.1 ms a step (1.6 s of 14.6 s)"."""
    least = "at least " * bool(report.unmeasured)
    parts = [f"{ABOUT[each].activity} {least}{report.causes[each].fraction:.1%}" for each in causes]
    seconds = sum(report.causes[each].seconds for each in causes)
    text = f"{' and '.join(parts)} of {short(report.step_seconds or 0.0)} a step"
    text += f" ({seconds:,.1f} s of {report.seconds:,.1f} s)"
    if "evaluation" in causes:
        text += "; the device computes meanwhile, but does not train"
    return text


def _without_cause(report: StallReport, found: list[Advice]) -> tuple[Advice | None, str, str]:
    """Return what to change, verdict and reason of a loop that hardly waits."""
    stall, step = report.stall or 0.0, short(report.step_seconds or 0.0)
    largest = max(report.causes, key=lambda cause: report.causes[cause].fraction)
    part = report.causes[largest].fraction
    reason = f"the work takes {1 - stall:.1%} of {step} a step"
    if part >= 0.0005:
        reason += f"; the largest cause of stall is {largest}, {part:.1%}"
    other = found[0] if found else None
    if report.unmeasured:
        reason = f"outside of the work, the device waits {stall:.1%} of {step} a step; inside, "
        return other, "HARDLY WAITS OUTSIDE OF THE WORK", f"{reason}{report.unmeasured}"
    if report.on_gpu:
        return other, "THE DEVICE IS BUSY", reason
    faster = "use a GPU, more cores, a smaller model or fewer tokens a step"
    other = other or Advice(cause="work", text="", change=faster, gain=None)
    return other, "ON A CPU THE WORK ITSELF TAKES THE TIME", reason


def _own_share(report: StallReport, cause: Cause) -> float:
    """Return the share of a cause of this rank; 0 for communication, which a late rank explains."""
    return 0.0 if cause == "communication" else report.causes[cause].fraction


def _others(report: StallReport) -> str:
    return f"rank {1 - report.rank} waits" if len(report.ranks) == 2 else "the other ranks wait"


def _core_words(wait: float) -> str:
    return (
        f"the training thread was ready to run but got no core for {wait:.0%} of the time "
        f"({count_of(usable_cores(), 'core')})"
    )


def advise(report: StallReport, remedies: Mapping[str, str] = REMEDIES) -> list[Advice]:
    """Return advice on a report, largest gain first.

    A cause whose interval reaches 0 gets no advice.
    """
    if report.stall is None:
        return []
    found = [*_on_causes(report, remedies), *_beside_stall(report, report.stall, remedies)]
    return sorted(found, key=lambda piece: -(piece.gain or 0.0))


def _gain(share: float) -> float:
    """Return the gain in speed if a share of the time is saved."""
    return share / max(1e-9, 1 - share)


def _on_causes(report: StallReport, remedies: Mapping[str, str]) -> Iterator[Advice]:
    for cause, about in ABOUT.items():
        fraction, felt = report.causes[cause].fraction, _felt(cause, report)
        weighed = fraction if cause == "communication" else felt
        if weighed < about.named or not _is_certain(report, cause):
            continue  # too small, or not distinguishable from no stall
        change = f"{_remedy(cause, report, remedies)}{_lines(cause, report)}"
        text = f"{cause} {fraction:.1%}: {change}"
        yield Advice(cause=cause, text=text, change=change, gain=_gain(felt))


def _loader_remedy(loader: LoaderUse, num_workers: int, waiting: float) -> str:
    """Return advice on the number of workers that would keep up.

    Example: without workers, a loader takes 91 % of a loop's time. Each batch then trains for the
    other 9 %, so 91 / 9 = 10.1 workers would just keep up, and 12 are advised.
    """
    busy = num_workers or loader.share
    needed = max(num_workers + 1, math.ceil(_SPARE * busy / max(1e-9, 1 - waiting) - 1e-9))
    text = f"your {loader.name} has num_workers={num_workers}; set it to {needed:,}"
    if not num_workers:
        items = loader.batch_size or 1
        of = "an item" if loader.batch_size else "a batch"
        text += f", since {of} costs {loader.batch_seconds / items * 1e3:.1f} ms"
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


def _beside_stall(
    report: StallReport, stall: float, remedies: Mapping[str, str]
) -> Iterator[Advice]:
    """Yield advice on costs in tokens per second other than stall."""
    if report.core_wait is not None and report.core_wait >= _MUCH_CORE_WAIT:
        change = "end other processes, or use fewer workers and threads"
        yield Advice(
            cause="cores",
            text=f"{_core_words(report.core_wait)}: {change}",
            change=change,
            gain=None if report.on_gpu else _gain(report.core_wait),
        )
    if report.padding is not None and report.padding >= _MUCH_PADDING:
        yield Advice(
            cause="padding",
            text=f"padding {report.padding:.0%}: {remedies['padding']}",
            change=remedies["padding"],
            gain=_gain(report.padding),
        )
    unseen = 0.0 if report.at_most is None else report.at_most - stall
    if unseen >= _MUCH_UNSEEN and not report.unmeasured:
        change = "run more steps"
        if report.events.get("waits"):
            lines = _lines("wait", report).removeprefix("; ")
            change = f"the host waits for the device inside the work, at {lines}: remove the wait"
        text = f"{unseen:.0%} may be idle inside the work: {change}"
        yield Advice(cause="unseen", text=text, change=change, gain=None)
    if report.mfu is not None and report.mfu < _LOW_MFU and stall < _LITTLE_STALL:
        change = "look at kernels, precision and the size of micro-batches"
        yield Advice(
            cause="kernels",
            text=f"MFU {report.mfu:.0%}, and feeding is not the problem: {change}",
            change=change,
            gain=None,
        )
