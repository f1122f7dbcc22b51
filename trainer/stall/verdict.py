"""The conclusions of a report: verdict, reason and next step, and advice with its gain."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TypeGuard

from tokenfeed.pipeline.feeding.placement import usable_cores
from tokenfeed.pipeline.text import count_of
from tokenfeed.trainer.stall.causes import ABOUT, REMEDIES, Cause
from tokenfeed.trainer.stall.stall_report import Advice, StallReport, gain_words, short
from tokenfeed.trainer.stall.watchers import Loader

_MUCH_STALL = 0.10
"""If the stall is larger, the verdict names its largest cause, however small that is."""
_NEAR = 0.7
"""The verdict also names a second cause that takes at least this share of the largest one."""
_SHORT_OF_CORES = 0.20
"""The verdict is SHORT OF CORES if the thread gets no core for more than this share of the time."""
_MUCH_CORE_WAIT = 0.10
"""The same for a piece of advice."""
_MUCH_PADDING = 0.10
"""Share of padding from which there is advice on it."""
_LOW_MFU = 0.30
"""MFU below which there is advice on kernels, if the stall is below `_LITTLE_STALL`."""
_LITTLE_STALL = 0.02


def conclude(
    report: StallReport,
    remedies: Mapping[str, str] | None = None,
    loader: Loader | None = None,
) -> StallReport:
    """Return a report with its verdict, its reason, the next step, and advice, largest gain first.

    A cause whose interval reaches 0 gets no advice.

    Args:
        report: The report.
        remedies: What to change in this loop by name, instead of the general remedies. The names
            are those of `REMEDIES`.
        loader: The loader that the loop waits for.
    """
    known = REMEDIES | dict(remedies or {})
    if report.stall is None:
        why = report.not_measured.removeprefix("not measured: ")
        change = known["steps" if not report.queued_steps else "more steps"]
        return dataclasses.replace(report, verdict="NOT MEASURED", reason=why, next_step=change)
    found = [
        *_on_causes(report, known, loader),
        *_on_late_rank(report, known, loader),
        *_beside_stall(report, report.stall, known),
    ]
    found.sort(key=lambda piece: -(piece.gain or 0.0))
    of_cause = {piece.cause: piece for piece in found}
    causes, late = main_causes(report), report.waited_for
    share = report.causes[causes[0]].fraction if causes else 0.0
    if late and (not causes or causes[0] == "communication" or late.cost >= share):
        verdict, reason = f"WAITS FOR RANK {late.rank}", report.slowest_line
        named, share = of_cause.get("rank"), late.cost
    elif causes:
        verdict, reason = " AND ".join(_short_verdicts(causes)), _share_words(report, causes)
        named = of_cause.get(causes[0])
    else:
        verdict, reason = _without_cause(report)
        named = found[0] if found else None
    if report.late_rank and late is None:
        longer = short(report.late_rank.step_seconds)
        others = [each.rank for each in report.ranks if each.rank != report.rank]
        waiting = f"rank {others[0]} waits" if len(others) == 1 else "other ranks wait"
        reason += f"; {waiting} for this rank, {longer} a step"
    wait = report.core_wait or 0.0
    if wait >= _SHORT_OF_CORES and wait > share and (share or not report.on_gpu):
        reason = f"{_core_words(wait)}; beside that, {reason}"
        named, verdict = of_cause["cores"], "SHORT OF CORES"
    next_step = _next(named) if named else _NOTHING[report.on_gpu]
    return dataclasses.replace(
        report, verdict=verdict, reason=reason, next_step=next_step, advice=found
    )


_NOTHING = {
    True: "nothing to gain from faster feeding",
    False: "use a GPU, more cores, a smaller model or fewer tokens a step",
}
"""The next step of a busy device, by whether it is a GPU."""


def _next(piece: Advice) -> str:
    return piece.change if piece.gain is None else f"{piece.change}: {gain_words(piece.gain)}"


def main_causes(report: StallReport) -> list[Cause]:
    """Return the main cause of a stall, and a second one that is nearly as large; empty without a
    cause that is worth a name."""
    is_much = (report.stall or 0.0) >= _MUCH_STALL
    shares: dict[Cause, float] = {c: part.fraction for c, part in report.causes.items()}
    certain: list[Cause] = [cause for cause in shares if _is_certain(report, cause)]
    certain.sort(key=shares.__getitem__, reverse=True)
    worth: list[Cause] = [
        cause for cause in certain[:2] if is_much or shares[cause] >= ABOUT[cause].named
    ]
    return [cause for cause in worth if shares[cause] >= _NEAR * shares[worth[0]] > 0]


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


def _without_cause(report: StallReport) -> tuple[str, str]:
    """Return verdict and reason of a loop that hardly waits."""
    stall, step = report.stall or 0.0, short(report.step_seconds or 0.0)
    if report.unmeasured:
        reason = f"outside of the work, the device waits {stall:.1%} of {step} a step; inside, "
        return "HARDLY WAITS OUTSIDE OF THE WORK", f"{reason}{report.unmeasured}"
    reason = f"the work takes {1 - stall:.1%} of {step} a step"
    if largest := next(iter(report.shown_causes.items()), None):
        reason += f"; the largest cause of stall is {largest[0]}, {largest[1].fraction:.2%}"
    busy = "THE DEVICE IS BUSY" if report.on_gpu else "ON A CPU THE WORK ITSELF TAKES THE TIME"
    return busy, reason


def _core_words(wait: float) -> str:
    return (
        f"the training thread was ready to run but got no core for {wait:.0%} of the time "
        f"({count_of(usable_cores(), 'core')})"
    )


def _gain(share: float) -> float:
    """Return the gain in speed if a share of the time is saved."""
    return share / max(1e-9, 1 - share)


def _advice(cause: str, finding: str, change: str, gain: float | None) -> Advice:
    return Advice(cause=cause, text=f"{finding}: {change}", change=change, gain=gain)


def _on_causes(
    report: StallReport, remedies: Mapping[str, str], loader: Loader | None
) -> Iterator[Advice]:
    main = main_causes(report)
    for cause, about in ABOUT.items():
        fraction, saved = report.causes[cause].fraction, _saved(cause, report)
        if saved < (1e-9 if cause in main else about.named) or not _is_certain(report, cause):
            continue  # too small, or not distinguishable from no stall
        change = remedies[cause]
        if cause == "data" and _has_workers(loader):
            change = loader.remedy(fraction)
        elif cause == "wait" and (lines := _lines(report)):
            change = f"read these values a step later, or only when you log: {lines}"
        elif cause == "communication" and report.slowest_rank:
            change = remedies["exchange"]
        yield _advice(cause, f"{cause} {fraction:.1%}", change, _gain(saved))


def _has_workers(loader: Loader | None) -> TypeGuard[Loader]:
    return loader is not None and loader.num_workers is not None


def _on_late_rank(
    report: StallReport, remedies: Mapping[str, str], loader: Loader | None
) -> Iterator[Advice]:
    if late := report.waited_for:
        remedy = remedies[late.cause]
        if late.cause == "data" and _has_workers(loader):  # which is like that of this rank
            rank = next(each for each in report.ranks if each.rank == late.rank)
            remedy = loader._replace(busy=None).remedy(rank.causes["data"] / rank.seconds)
        change = f"rank {late.rank}: {remedy}"
        text = f"rank {late.rank} is late by {late.cause}: {remedy}"
        yield Advice(cause="rank", text=text, change=change, gain=_gain(late.cost))


def _saved(cause: Cause, report: StallReport) -> float:
    """Return the share of the time that a run saves without a cause.

    If this rank waits for a late one, this is at most the late rank's own share of the cause:
    whatever this rank saves, it waits longer. Without communication, it still waits.
    """
    fraction, late = report.causes[cause].fraction, report.waited_for
    if late is None:
        return fraction
    if cause == "communication":
        waited = late.cost * (1 - late.hidden_seconds / late.step_seconds)
        return max(0.0, fraction - waited)
    waited_for = next(each for each in report.ranks if each.rank == late.rank)
    return min(fraction, waited_for.causes.get(cause, 0.0) / waited_for.seconds)


def _lines(report: StallReport) -> str:
    """Return the source lines at which the host waits, if they were looked for."""
    waits: dict[str, float] = report.events.get("waits", {})
    return ", ".join(f"{line} ({count:g} a step)" for line, count in list(waits.items())[:3])


def _beside_stall(
    report: StallReport, stall: float, remedies: Mapping[str, str]
) -> Iterator[Advice]:
    """Yield advice on costs in tokens per second other than stall."""
    if report.core_wait is not None and report.core_wait >= _MUCH_CORE_WAIT:
        change = "end other processes"
        if report.causes["data"].fraction < _MUCH_CORE_WAIT:  # else the loop needs its workers
            change += ", or use fewer workers and threads"
        gain = None if report.on_gpu else _gain(report.core_wait)
        yield _advice("cores", _core_words(report.core_wait), change, gain)
    if report.padding is not None and report.padding >= _MUCH_PADDING:
        change, gain = remedies["padding"], _gain(report.padding)
        yield _advice("padding", f"padding {report.padding:.0%}", change, gain)
    if report.mfu is not None and report.mfu < _LOW_MFU and stall < _LITTLE_STALL:
        change = "look at kernels, precision and the size of micro-batches"
        finding = f"MFU {report.mfu:.0%}, and feeding is not the problem"
        yield _advice("kernels", finding, change, None)
