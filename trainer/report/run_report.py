"""The report of a run: report.json for programs, a few lines for people.

Speed and stall are those of the measured steps since the start or the latest resume, without the
warm-up. Tokens, losses and padding are those of all steps. A run writes interim reports, so that a
killed run keeps what it measured.
"""

import functools
import importlib.metadata
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec

from tokenfeed.pipeline.facts import facts
from tokenfeed.pipeline.feeding.stats import RemoteStats
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.trainer.config.run_config import CHECKPOINTS_FOLDER, PAGE_FILE, REPORT_FILE
from tokenfeed.trainer.stall.stall_report import StallReport, advice, speed_parts, stall_facts

_log = logging.getLogger(__name__)
RowsByLength = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=64)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTokens:
    """The tokens of a stage so far, by data set, as its weights plan them."""

    until: int | None
    """Tokens of the run at which the stage ends; None for the last one."""
    planned: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The outcome of a run."""

    run_dir: str
    finished: bool
    """False if the run stopped before its last step, or is still going on."""
    steps: int
    """Steps trained, those before a resume included."""
    skipped_steps: int
    """Steps that changed nothing, because their gradients were not finite."""
    tokens: int
    """Real tokens trained, those before a resume included."""
    seconds: float
    """Wall time since the start or the latest resume, set-up and evaluation included."""
    real_tokens_per_s: float | None
    """Real tokens of the measured steps divided by their wall time, stall included; None if the run
    ended in its warm-up."""
    padding: float
    """Share of all token slots that held no token."""
    stall: StallReport
    remote: RemoteStats | None = None
    """What the training data took from a store; None if they are local."""
    loss_first: float | None
    """Loss of the first step; None if metrics.jsonl was lost."""
    loss_last: float | None
    """Mean loss over the steps of the last progress line."""
    validation_loss_first: float | None
    """None without a validation split, or if the loss was not finite."""
    validation_loss_last: float | None
    task: str
    metrics: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Metrics of the best weights, by split and name: `loss`, and those of the task. None if the
    model's predictions were not numbers."""
    notes: list[str] = field(default_factory=list)
    """What the results call for, such as more epochs."""
    best_step: int | None = None
    """The step of the best weights; None if nothing was evaluated."""
    model: str
    parameters: int
    vocabulary_size: int
    device: str
    precision: str
    versions: dict[str, str]
    stages: list[StageTokens] = field(default_factory=list)
    """The stages of `mixing` that the run has reached; empty without `mixing`."""
    delivered: dict[str, int] = field(default_factory=dict)
    """Tokens of each data set in all stages so far."""
    rows_by_length: RowsByLength = field(default_factory=list)
    """Rows of the split `train` by length in tokens: entry k counts those of 2**k up to
    2**(k+1) - 1."""

    @property
    def planned(self) -> Mapping[str, float]:
        """Tokens of each data set in all stages so far, as the weights plan them."""
        return {n: sum(s.planned.get(n, 0.0) for s in self.stages) for n in self.delivered}

    @classmethod
    def of_run(cls, run_dir: Path) -> "Report | None":
        """The report in a run's folder; None if it is missing or damaged."""
        try:
            return cls.of_json((run_dir / REPORT_FILE).read_bytes(), run_dir)
        except (OSError, ValueError, RecursionError):
            return None

    @classmethod
    def of_json(cls, data: bytes, run_dir: Path) -> "Report":
        """Decode report.json of the run that is in a folder now.

        Raises:
            ValueError, RecursionError: It is not a report.
        """
        # The folder may have been moved or copied.
        return replace(msgspec.json.decode(data, type=cls), run_dir=str(run_dir))

    def write(self, run_dir: Path) -> None:
        """Write report.json, atomically."""
        content = msgspec.json.format(msgspec.json.encode(self), indent=1)  # null for NaN
        atomic_write(run_dir / REPORT_FILE, content + b"\n")

    def summary(self) -> str:
        """The report in a few lines."""
        loss = _change(self.loss_first, self.loss_last)
        if self.validation_loss_first is not None:
            change = _change(self.validation_loss_first, self.validation_loss_last)
            loss += f", validation {change}"
        end = "" if self.finished else f", {self._way_on()}"
        skipped = f" ({self.skipped_steps:,} skipped)" if self.skipped_steps else ""
        folder = Path(self.run_dir)
        files = [name for name in (PAGE_FILE, REPORT_FILE) if (folder / name).exists()]
        speed = speed_parts(self.stall, self.padding)
        if self.real_tokens_per_s is None:
            speed = ["not measured", *speed]
        return facts(
            {
                "model": f"{self.model}, {self.parameters / 1e6:.1f} M parameters, "
                f"{self.precision} on {self.device}",
                "trained": f"{self.steps:,} steps{skipped}, {self.tokens:,} real tokens{end}",
                "loss": loss,
                "metrics": "\n".join(self._metrics()),
                "note": "\n".join(self.notes),
                "speed": ", ".join(speed),
                **stall_facts(self.stall),
                "store": _store(self.remote),
                "advice": advice(self.stall),
                "report": f"{folder / ', '.join(files)}" if files else "",
            }
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
            f"{split}{step}: "
            + ", ".join(f"{k} {v:.4f}" if v is not None else f"{k} nan" for k, v in metrics.items())
            for split, metrics in self.metrics.items()
        ]


def _store(found: RemoteStats | None) -> str:
    """Return what the run read from a store; empty for local data."""
    if found is None:
        return ""
    return (
        f"{found.requests:,} requests, {found.bytes / 1e6:,.1f} MB, {found.hits:,} hits in the "
        f"cache, {found.retries:,} retries, {found.outage_s:.1f} s of outage, windows at hand "
        f"after {found.wait_s.p99:.3f} s (p99)"
    )


Shares = Mapping[str, float]
"""Shares of the tokens by data set. Their sum is 1."""


def planned_tokens(
    stages: Sequence[tuple[int | None, Shares, Shares]], tokens: int
) -> list[StageTokens]:
    """Return the planned tokens of the stages that a run has reached.

    Args:
        stages: Of each stage the tokens of the run at its end, and the shares at both ends.
        tokens: The tokens of the run so far.
    """
    found, begin = [], 0
    for until, first, last in stages:
        end = tokens if until is None else min(tokens, until)
        if end <= begin:
            break
        middle = 0.0 if until is None else (end - begin) / 2 / (until - begin)
        shares = {name: first[name] + middle * (last[name] - first[name]) for name in first}
        planned = {name: (end - begin) * share for name, share in shares.items()}
        found.append(StageTokens(until=until, planned=planned))
        begin = end
    return found


def _change(first: float | None, last: float | None) -> str:
    if first is None or last is None:
        return "not known"
    return f"{first:.4f} -> {last:.4f}"


@functools.cache
def versions() -> dict[str, str]:
    """Versions that the figures of a report depend on."""
    return {
        "tokenfeed": importlib.metadata.version("tokenfeed"),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }
