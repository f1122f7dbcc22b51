"""The report of a meter: for programs as report.json, for people as a table."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.trainer.stall.causes import Cause
from tokenfeed.trainer.stall.ranks import RankStall, SlowestRank
from tokenfeed.trainer.stall.table import advice_lines, cause_table, headline, rank_table

__all__ = ["Advice", "CauseReport", "Interval", "StallReport", "efficiency_parts"]

REPORT_FILE = "report.json"

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseReport:
    """Idle time of one cause."""

    fraction: float
    """Of the wall time, 0 to 1."""
    seconds: float
    interval: Interval | None
    """Holds the fraction in 95 of 100 runs; None of too few steps."""
    p50_s: float
    """A step; half of the steps have no more."""
    p95_s: float
    p99_s: float
    max_s: float
    speed_up: float
    """What the run gained at least without it: 1.05 is 5 % more tokens a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One thing to change."""

    cause: str
    is_severe: bool
    text: str
    gain: float | None
    """Tokens a second that it gains at least, as a share of today's; None where that is open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StallReport:
    """Where the time of the measured steps went."""

    stall: float | None
    """Share of the wall time in which the device had nothing of the training to run, 0 to 1; None
    before the first measured step."""
    interval: Interval | None
    at_most: float | None
    """The same with all that may be idle inside work, where nothing is known of it."""
    causes: dict[Cause, CauseReport]
    """All of them; they sum to the stall."""
    steps: int
    seconds: float
    tokens: int
    real_tokens_per_s: float | None
    padding: float | None
    """Share of token slots that held no token; None where tokens were not told."""
    mfu: float | None
    """Operations of the training by those that the device could do; None where either is not
    known."""
    mfu_formula: str | None
    joules_per_token: float | None
    device: str
    on_gpu: bool
    method: str
    events: dict[str, Any]
    """How often what happened; `waits` a step by line, where they were looked for."""
    ranks: list[RankStall]
    """What each rank had measured when all told each other last; nothing of a loop that is alone.
    """
    slowest_rank: SlowestRank | None
    """Who the others wait for."""
    advice: list[Advice]

    def __str__(self) -> str:
        stall = self.to_dict()
        return "\n".join(
            [
                f"stall    {headline(stall)}",
                *(f"         {line}" for line in cause_table(stall)),
                *rank_table(stall),
                f"speed    {self._speed()}",
                f"device   {self.device}; {self.method}",
                *(f"advice   {line}" for line in advice_lines(stall)),
            ]
        )

    def _speed(self) -> str:
        parts = []
        if self.real_tokens_per_s is not None:
            parts.append(f"{self.real_tokens_per_s:,.0f} real tok/s")
        if self.padding is not None:
            parts.append(f"padding {self.padding:.2%}")
        return ", ".join(parts + efficiency_parts(self.efficiency())) or "tokens were not told"

    def to_dict(self) -> dict[str, Any]:
        """The part `stall` of report.json."""
        return {
            "fraction": self.stall,
            "interval": self.interval,
            "at_most": self.at_most,
            "parts": {cause: asdict(part) for cause, part in self.causes.items()},
            "window_steps": self.steps,
            "window_seconds": self.seconds,
            "method": self.method,
            "on_gpu": self.on_gpu,
            "events": self.events,
            "ranks": [asdict(each) for each in self.ranks],
            "slowest_rank": self.slowest_rank and asdict(self.slowest_rank),
            "advice": [asdict(piece) for piece in self.advice],
        }

    def efficiency(self) -> dict[str, Any]:
        """The part `efficiency` of report.json."""
        return {
            "mfu": self.mfu,
            "mfu_formula": self.mfu_formula,
            "joules_per_token": self.joules_per_token,
        }

    def write(self, folder: Path | str) -> None:
        """Write report.json into a folder, atomically."""
        content = {
            "device": self.device,
            "tokens": self.tokens,
            "real_tokens_per_s": self.real_tokens_per_s,
            "padding": self.padding,
            "efficiency": self.efficiency(),
            "stall": self.to_dict(),
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        atomic_write(Path(folder) / REPORT_FILE, json.dumps(content, indent=1).encode() + b"\n")


def efficiency_parts(efficiency: dict[str, Any]) -> list[str]:
    """What is known of it in words."""
    mfu, joules = efficiency.get("mfu"), efficiency.get("joules_per_token")
    parts = [] if mfu is None else [f"MFU {mfu:.1%} ({efficiency['mfu_formula']})"]
    return parts if joules is None else [*parts, f"{joules * 1e3:.3g} mJ a token"]
