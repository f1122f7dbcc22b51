"""What a run was worth: report.json for scripts, a few lines for people.

Speed and stall come from the same window of steps on the same clock, warm-up left out; tokens,
losses and padding are those of all steps.
"""

import importlib.metadata
import json
import platform
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.trainer.config import CHECKPOINTS_FOLDER, PAGE_FILE, REPORT_FILE
from tokenfeed.trainer.stall.report import efficiency_parts
from tokenfeed.trainer.stall.table import advice_lines, cause_table, headline, rank_table

__all__ = ["Report", "versions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The outcome of a run."""

    run_dir: str
    finished: bool
    """False where the run was ended before its last step, or is still going on."""
    steps: int
    """Trained in all, those before a resume included."""
    skipped_steps: int
    """Of these, those that changed nothing: their gradients were not finite."""
    tokens: int
    """Real tokens trained in all."""
    seconds: float
    """Wall time of this session, set-up and evaluation included."""
    real_tokens_per_s: float | None
    """Real tokens of the measured steps by their wall time, stall included; None where the session
    ended in its warm-up."""
    padding: float
    """Fraction of all token slots that held no token."""
    stall: dict[str, Any]
    """See `StallReport.to_dict`."""
    efficiency: dict[str, Any] = field(default_factory=dict)
    """MFU, by which formula, and joules a token; what is not known is null."""
    remote: dict[str, Any] | None = None
    """What the training data took of a store; see `RemoteStats`. None where they are local."""
    loss_first: float | None
    """Of the first step; None where metrics.jsonl was lost."""
    loss_last: float | None
    """Mean over the steps of the last progress line."""
    validation_loss_first: float | None
    validation_loss_last: float | None
    task: str = "lm"
    """What was learnt."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """By split and name, of the best weights: `loss` and what the task adds."""
    best_step: int | None = None
    """The step of these weights; None where nothing was evaluated."""
    model: str
    parameters: int
    vocabulary_size: int
    device: str
    precision: str
    versions: dict[str, str]

    @classmethod
    def of_run(cls, run_dir: Path) -> "Report | None":
        """The report that a run left; None where it left none that can be read. The folder may
        have another name by now: a copy of the run, or moved."""
        try:
            return cls.of_json((run_dir / REPORT_FILE).read_bytes(), run_dir)
        except (OSError, ValueError, RecursionError):
            return None

    @classmethod
    def of_json(cls, data: bytes, run_dir: Path) -> "Report":
        """What report.json says of the run that is in a folder by now.

        Raises:
            ValueError: It is no report.
            RecursionError: It is none, and deep.
        """
        found = msgspec.convert(json.loads(data), cls)  # msgspec alone reads no infinite loss
        return replace(found, run_dir=str(run_dir))

    def write(self, run_dir: Path) -> None:
        """Write report.json, atomically."""
        atomic_write(run_dir / REPORT_FILE, self.to_json().encode() + b"\n")

    def to_json(self) -> str:
        """The report as indented JSON."""
        return json.dumps(asdict(self), indent=1)

    def summary(self) -> str:
        """The report in a few lines."""
        loss = _change(self.loss_first, self.loss_last)
        if self.validation_loss_first is not None:
            change = _change(self.validation_loss_first, self.validation_loss_last)
            loss += f", validation {change}"
        end = "" if self.finished else f", {self._way_on()}"
        skipped = f" ({self.skipped_steps:,} skipped)" if self.skipped_steps else ""
        return "\n".join(
            [
                f"model    {self.model}, {self.parameters / 1e6:.1f} M parameters, "
                f"{self.precision} on {self.device}",
                f"trained  {self.steps:,} steps{skipped}, {self.tokens:,} real tokens{end}",
                f"loss     {loss}",
                *self._metrics(),
                f"speed    {self._speed()}",
                f"stall    {headline(self.stall)}",
                *(f"         {line}" for line in cause_table(self.stall)),
                *rank_table(self.stall),
                *self._store(),
                *(f"advice   {line}" for line in advice_lines(self.stall)),
                f"report   {Path(self.run_dir) / PAGE_FILE}, {REPORT_FILE}",
            ]
        )

    def _way_on(self) -> str:
        """How a run that did not reach its last step can go on."""
        if any((Path(self.run_dir) / CHECKPOINTS_FOLDER).glob("step-????????")):
            return "stopped before the end: go on with --resume"
        return "ended before its first checkpoint: start it again without --resume"

    def _metrics(self) -> list[str]:
        """A line for each split that was measured."""
        step = "" if self.best_step is None else f", best at step {self.best_step:,}"
        return [
            f"metrics  {split}{step}: " + ", ".join(f"{k} {v:.4f}" for k, v in metrics.items())
            for split, metrics in self.metrics.items()
        ]

    def _store(self) -> list[str]:
        """A line for data in a store."""
        if (found := self.remote) is None:
            return []
        parts = [
            f"{found['requests']:,} requests, {found['bytes'] / 1e6:,.1f} MB",
            f"{found['hits']:,} hits in the cache",
            f"{found['retries']:,} retries, {found['outage_s']:.1f} s of outage",
            f"windows at hand after {found['wait_s']['p99']:.3f} s (p99)",
        ]
        return [f"store    {', '.join(parts)}"]

    def _speed(self) -> str:
        if self.real_tokens_per_s is None:
            return f"not measured, padding {self.padding:.2%}"
        parts = [f"{self.real_tokens_per_s:,.0f} real tok/s", f"padding {self.padding:.2%}"]
        return ", ".join(parts + efficiency_parts(self.efficiency))


def _change(first: float | None, last: float | None) -> str:
    if first is None or last is None:
        return "not known"
    return f"{first:.4f} -> {last:.4f}"


def versions() -> dict[str, str]:
    """What the figures of a report depend on, besides the hardware."""
    return {
        "tokenfeed": importlib.metadata.version("tokenfeed"),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }
