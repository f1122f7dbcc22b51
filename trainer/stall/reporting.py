"""Make a report from the sums of a ledger."""

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
    """
    seconds, tokens_per_s = reading.seconds, reading.tokens_per_s
    total = reading.fraction if reading.steps else None
    error = reading.reference_error / seconds if seconds else 0.0
    unseen = reading.unseen_seconds / seconds if seconds else 0.0
    mfu, formula = _mfu(machine, tokens_per_s)
    report = StallReport(
        stall=total,
        interval=_interval(total, ledger.batches.half_width(None), error, unseen),
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
    report.advice.extend(advise(report, remedies, loader))
    return report


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
        interval=_interval(fraction, ledger.batches.half_width(cause)) if reading.steps else None,
        p50_s=quantiles[0],
        p95_s=quantiles[1],
        p99_s=quantiles[2],
        max_s=tail.largest if tail else 0.0,
        speed_up=1 / max(1e-9, 1 - fraction),
    )


def _interval(
    fraction: float | None, half_width: float | None, error: float = 0.0, unseen: float = 0.0
) -> Interval | None:
    """Both sides of a fraction: what steps vary, what references vary, what is not seen."""
    if fraction is None or half_width is None:
        return None
    either_side = math.hypot(half_width, error)
    return max(0.0, fraction - either_side), min(1.0, fraction + either_side + unseen)


def _mfu(machine: _Machine, tokens_per_s: float) -> tuple[float | None, str | None]:
    peak, operations = machine.peak_tflops, machine.operations_per_token
    if peak is None or operations is None or not tokens_per_s:
        return None, None
    formula = (
        f"{operations:.4g} operations a token x {tokens_per_s:,.0f} real tok/s / {peak:g} TFLOP/s, "
        f"dense half precision of {machine.name}"
    )
    return operations * tokens_per_s / (peak * 1e12), formula
