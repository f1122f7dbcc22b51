"""The report of a meter: report.json for programs, a table and a page for people."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenfeed.pipeline.facts import facts
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.trainer.stall.causes import Cause
from tokenfeed.trainer.stall.ranks import RankStall, SlowestRank
from tokenfeed.trainer.stall.table import advice, speed_parts, stall_facts

__all__ = ["Advice", "CauseReport", "Interval", "StallReport"]

REPORT_FILE = "report.json"

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseReport:
    """Idle time of one cause."""

    fraction: float
    """Share of the wall time, 0 to 1."""
    seconds: float
    interval: Interval | None
    """Held the fraction in 95 of 100 simulated runs; None after too few steps."""
    p50_s: float
    """Seconds per step: half of the steps have no more. The next two are other percentiles."""
    p95_s: float
    p99_s: float
    max_s: float
    speed_up: float
    """Tokens per second without this cause, divided by today's, at least: 1.05 is 5 % more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One thing to change."""

    cause: str
    is_severe: bool
    text: str
    gain: float | None
    """Gain in tokens per second, at least, as a share of today's; None if it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StallReport:
    """Where the time of the measured steps went."""

    stall: float | None
    """Share of the wall time in which the device had nothing of the training to run, 0 to 1; None
    before the first measured step."""
    interval: Interval | None
    """Held the stall in 95 of 100 simulated runs; None after too few steps."""
    at_most: float | None
    """The stall plus all idle time that there can be inside work that could not be calibrated."""
    causes: dict[Cause, CauseReport]
    """Every cause. Their fractions sum to the stall."""
    steps: int
    """Measured steps: those after the warm-up."""
    queued_steps: int
    """Calls of `StallMeter.step`, warm-up included."""
    seconds: float
    """Wall time of the measured steps."""
    tokens: int
    real_tokens_per_s: float | None
    padding: float | None
    """Share of token slots that held no token; None if `step` got no tokens."""
    mfu: float | None
    """Floating-point operations of the training divided by those that the device could do; None if
    either is not known."""
    mfu_formula: str | None
    joules_per_token: float | None
    core_wait: float | None
    """Share of the time in which the training thread was ready to run and got no core; None where
    the system does not count it."""
    device: str
    on_gpu: bool
    method: str
    events: dict[str, Any]
    """Counts of events. `waits` has the waits per step by source line, if they were looked for."""
    ranks: list[RankStall]
    """What each rank had measured at the latest `gather`; empty for a single process."""
    slowest_rank: SlowestRank | None
    """The rank that the others wait for."""
    advice: list[Advice]

    def __str__(self) -> str:
        shown = _shown(self)
        speed = ", ".join(speed_parts(shown, self.padding)) or "no tokens were passed to `step`"
        end = {"speed": speed, "device": f"{self.device}; {self.method}", "advice": advice(shown)}
        return facts(stall_facts(shown) | end)

    def write(self, folder: Path | str) -> Path:
        """Write report.json and report.html into a folder, each atomically.

        Returns:
            The page, report.html.
        """
        from tokenfeed.trainer.stall.page import render_page, save_page  # needs jinja2

        Path(folder).mkdir(parents=True, exist_ok=True)
        content = json.dumps({"stall": asdict(self)}, indent=1)
        atomic_write(Path(folder) / REPORT_FILE, content.encode() + b"\n")
        return save_page(Path(folder), render_page(Path(folder), self))


def _shown(report: Any) -> Any:
    """Return the report. Pyright knows this file by two names, and takes them for two types."""
    return report
