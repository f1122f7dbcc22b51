"""Make a report from the sums of a ledger."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tokenfeed.trainer.stall.advice import advise
from tokenfeed.trainer.stall.causes import CAUSES, Cause
from tokenfeed.trainer.stall.ledger import Ledger
from tokenfeed.trainer.stall.ranks import RankStall, slowest_rank
from tokenfeed.trainer.stall.reading import StallReading
from tokenfeed.trainer.stall.report import CauseReport, Interval, StallReport
from tokenfeed.trainer.stall.watched import LoaderUse

__all__ = ["make_report"]

_LEAST_ERROR = 0.001
"""Share of the time: what latencies and rounding add up to, seen on the simulated device."""


class _Machine(Protocol):
    """The machine as a report needs it."""

    operations_per_token: float | None

    @property
    def on_gpu(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def peak_tflops(self) -> float | None: ...
    def joules_per_token(self) -> float | None: ...


def make_report(
    reading: StallReading,
    ledger: Ledger,
    machine: _Machine,
    *,
    method: str,
    events: dict[str, Any],
    ranks: Sequence[RankStall],
    queued_steps: int,
    core_wait: float | None,
    loader: LoaderUse | None,
    remedies: Mapping[str, str],
    earlier: StallReport | None,
) -> StallReport:
    """Report on a reading, with the percentiles and error bars of its ledger.

    Args:
        reading: Sums of the measured steps.
        ledger: The ledger that the reading is from.
        machine: The device.
        method: What is measured, and how.
        events: Counts of events.
        ranks: What each rank measured, if there are several.
        queued_steps: Calls of `step`, warm-up included.
        core_wait: Share of the time in which the training thread got no core.
        loader: What is known about the loader that the loop waits for.
        remedies: Advice of this loop by cause, instead of the general one.
        earlier: The report of the parts of the run before this one.
    """
    seconds, tokens_per_s = reading.seconds, reading.tokens_per_s
    total = reading.fraction if reading.steps else None
    unseen = reading.unseen_seconds / seconds if seconds else 0.0
    mfu, formula = _mfu(machine, tokens_per_s)
    report = StallReport(
        stall=total,
        interval=_interval(None, reading, ledger, unseen),
        at_most=None if total is None else min(1.0, total + unseen),
        causes=_causes(reading, ledger),
        steps=reading.steps,
        queued_steps=queued_steps,
        seconds=seconds,
        tokens=reading.tokens,
        real_tokens_per_s=tokens_per_s if reading.tokens else None,
        padding=1 - reading.tokens / reading.slots if reading.slots else None,
        mfu=mfu,
        mfu_formula=formula,
        joules_per_token=machine.joules_per_token(),
        core_wait=core_wait,
        device=machine.name,
        on_gpu=machine.on_gpu,
        method=method,
        events=events,
        ranks=[*ranks],
        slowest_rank=slowest_rank(ranks),
        advice=[],
    )
    if earlier is not None:
        report = _with_earlier(report, earlier)
    report.advice.extend(advise(report, remedies, loader))
    return report


def _with_earlier(report: StallReport, earlier: StallReport) -> StallReport:
    """One report of both parts of a run. Seconds, steps and tokens are sums, and shares are means
    over the time. Percentiles are the larger ones. What cannot be summed is that of the later part:
    MFU, energy, ranks.

    Of 1 % stall in 300 s and 5 % in 100 s, 2 % remain.
    """
    queued_steps = report.queued_steps + earlier.queued_steps
    if report.stall is None or earlier.stall is None:
        known = earlier if report.stall is None else report
        return dataclasses.replace(known, queued_steps=queued_steps, advice=[])
    seconds = report.seconds + earlier.seconds
    parts = [(part, part.seconds / seconds) for part in (report, earlier)]
    tokens = sum(part.tokens for part, _ in parts)
    slots = [
        part.tokens / max(1e-9, 1 - part.padding) for part, _ in parts if part.padding is not None
    ]
    waits = [part.core_wait * share for part, share in parts if part.core_wait is not None]
    counts = {name: value for name, value in earlier.events.items() if isinstance(value, int)}
    return dataclasses.replace(
        report,
        stall=sum(share * (part.stall or 0.0) for part, share in parts),
        interval=_mean_interval([(part.interval, share) for part, share in parts]),
        at_most=sum(share * (part.at_most or 0.0) for part, share in parts),
        causes={
            cause: _mean_cause(
                [(part.causes[cause], share) for part, share in parts if cause in part.causes]
            )
            for cause in CAUSES
        },
        steps=report.steps + earlier.steps,
        queued_steps=queued_steps,
        seconds=seconds,
        tokens=tokens,
        real_tokens_per_s=tokens / seconds if tokens else None,
        padding=1 - tokens / sum(slots) if len(slots) == len(parts) and tokens else report.padding,
        core_wait=sum(waits) if len(waits) == len(parts) else report.core_wait,
        events=report.events
        | {name: report.events.get(name, 0) + count for name, count in counts.items()},
    )


def _mean_cause(parts: Sequence[tuple[CauseReport, float]]) -> CauseReport:
    both = [part for part, _ in parts]
    fraction = sum(share * part.fraction for part, share in parts)
    return CauseReport(
        fraction=fraction,
        seconds=sum(part.seconds for part in both),
        interval=_mean_interval([(part.interval, share) for part, share in parts]),
        p50_s=max(part.p50_s for part in both),
        p95_s=max(part.p95_s for part in both),
        p99_s=max(part.p99_s for part in both),
        max_s=max(part.max_s for part in both),
        speed_up=1 / max(1e-9, 1 - fraction),
    )


def _mean_interval(parts: Sequence[tuple[Interval | None, float]]) -> Interval | None:
    """The interval of a mean over the time, as of independent parts; None if a part has none."""
    known = [(interval, share) for interval, share in parts if interval is not None]
    if len(known) < len(parts):
        return None
    middle = sum(share * (low + high) / 2 for (low, high), share in known)
    half = math.hypot(*(share * (high - low) / 2 for (low, high), share in known))
    return max(0.0, middle - half), min(1.0, middle + half)


def _causes(reading: StallReading, ledger: Ledger) -> dict[Cause, CauseReport]:
    seconds, fractions = reading.cause_seconds, reading.cause_fractions
    return {
        cause: _cause(cause, seconds[cause], fractions[cause], reading, ledger) for cause in CAUSES
    }


def _cause(
    cause: Cause, seconds: float, fraction: float, reading: StallReading, ledger: Ledger
) -> CauseReport:
    tail = ledger.histograms.get(cause)
    quantiles = [tail.quantile(q, reading.steps) if tail else 0.0 for q in (0.5, 0.95, 0.99)]
    return CauseReport(
        fraction=fraction,
        seconds=seconds,
        interval=_interval(cause, reading, ledger),
        p50_s=quantiles[0],
        p95_s=quantiles[1],
        p99_s=quantiles[2],
        max_s=tail.largest if tail else 0.0,
        speed_up=1 / max(1e-9, 1 - fraction),
    )


def _interval(
    cause: Cause | None, reading: StallReading, ledger: Ledger, unseen: float = 0.0
) -> Interval | None:
    """Return the interval of the share of a cause, or of all of them.

    It is as wide as steps and references vary. It reaches lower by the time of the meter's marks,
    which may keep the device waiting too, and higher by what is not seen.
    """
    half_width = ledger.batches.half_width(cause)
    if not reading.seconds or half_width is None:
        return None
    fraction = reading.fraction if cause is None else reading.cause_fractions[cause]
    of_steps = half_width * (1 - reading.counted_fraction)
    of_references = reading.reference_error(cause) / reading.seconds
    either_side = math.hypot(of_steps, of_references, _LEAST_ERROR if fraction else 0.0)
    low = fraction - either_side - min(fraction, reading.marking_seconds / reading.seconds)
    return max(0.0, low), min(1.0, fraction + either_side + unseen)


def _mfu(machine: _Machine, tokens_per_s: float) -> tuple[float | None, str | None]:
    peak, operations = machine.peak_tflops, machine.operations_per_token
    if peak is None or operations is None or not tokens_per_s:
        return None, None
    formula = (
        f"{operations:.4g} operations a token x {tokens_per_s:,.0f} real tok/s / {peak:g} TFLOP/s, "
        f"dense half precision of {machine.name}"
    )
    return operations * tokens_per_s / (peak * 1e12), formula
