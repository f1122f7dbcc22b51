"""What to change, and what that gains: from a report. Nothing is said when all is well."""

from collections.abc import Iterator

from tokenfeed.trainer.stall.causes import ABOUT, Cause
from tokenfeed.trainer.stall.ranks import SlowestRank
from tokenfeed.trainer.stall.report import Advice, StallReport

__all__ = ["PADDING_REMEDY", "advise"]

_OF_WORK = (
    "its work takes longer: look at the clocks, the temperature and the neighbours of its device"
)
_OF_EXCHANGE = (
    "most of it is no late rank, but to exchange gradients: a larger `--step-tokens` does so less "
    "often, a quicker network sooner"
)
PADDING_REMEDY = "pack rows, or sort more of them by length"
"""Of a loop of which no more is known."""
_MUCH_PADDING = 0.10
_LOW_MFU = 0.30
_LITTLE_STALL = 0.02
_MUCH_UNSEEN = 0.05


def advise(report: StallReport, padding_remedy: str = PADDING_REMEDY) -> list[Advice]:
    """Advice on a report, the largest gain first; what to do about padding is for the loop to say,
    which knows whether its rows can be packed."""
    if report.stall is None:
        return []
    found = [*_on_causes(report), *_beside_stall(report, report.stall, padding_remedy)]
    return sorted(found, key=lambda piece: -(piece.gain or 0.0))


def _on_causes(report: StallReport) -> Iterator[Advice]:
    for cause, about in ABOUT.items():
        fraction, felt = report.causes[cause].fraction, _felt(cause, report)
        weighed = fraction if cause == "communication" else felt
        if weighed < about.named:
            continue
        text = f"{cause} {fraction:.1%}: {_remedy(cause, report)}{_lines(cause, report)}"
        gain = felt / max(1e-9, 1 - felt)
        yield Advice(cause=cause, is_severe=weighed >= about.severe, text=text, gain=gain)


def _felt(cause: Cause, report: StallReport) -> float:
    """The share of the time that is saved without a cause. Where a rank is late, no more than it
    has of the cause too, for what others save they wait longer; of communication, not the
    exchange."""
    fraction, late = report.causes[cause].fraction, _late(report)
    if late is None:
        return fraction
    waited_for = report.ranks[late.rank]
    own = waited_for.causes.get(cause, 0.0) / waited_for.seconds
    return min(fraction, late.cost if cause == "communication" else own)


def _remedy(cause: Cause, report: StallReport) -> str:
    """Of communication, what helps the rank that is waited for."""
    if cause != "communication" or report.slowest_rank is None:
        return ABOUT[cause].remedy
    late = _late(report)
    if late is None:
        return _OF_EXCHANGE
    own = _OF_WORK if late.cause == "work" else ABOUT[late.cause].remedy
    return f"rank {late.rank} is late by {late.cause}: {own}"


def _late(report: StallReport) -> SlowestRank | None:
    """The rank that makes the others wait for longer than they exchange, if one does."""
    slowest = report.slowest_rank
    if slowest is None or slowest.cost < 0.5 * report.causes["communication"].fraction:
        return None
    return slowest


def _lines(cause: Cause, report: StallReport) -> str:
    """Where the host waits, as far as that was looked for."""
    if cause != "wait":
        return ""
    waits: dict[str, float] = report.events.get("waits", {})
    if not waits:
        return "; in a loop of yours `meter.find_waits()` names the lines"
    return "; " + ", ".join(f"{line} ({count:g} a step)" for line, count in list(waits.items())[:3])


def _beside_stall(report: StallReport, stall: float, padding_remedy: str) -> Iterator[Advice]:
    """What costs tokens a second and is no stall."""
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
