"""The report of a run with phases: their reports, and the sum of their times."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.text import count_of, facts
from tokenfeed.trainer.config.run_config import PAGE_FILE, REPORT_FILE, phase_folders
from tokenfeed.trainer.report.run_files import Report
from tokenfeed.trainer.stall.stall_page import page_templates, save_page


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasesReport:
    """The outcome of a run with phases."""

    run_dir: str
    finished: bool
    """Whether all phases are finished."""
    steps: int
    """Steps trained, over all phases."""
    tokens: int
    """Real tokens trained, over all phases."""
    seconds: float
    """Sum of the times of the phases, with all their sessions."""
    phases: dict[str, Report | None]
    """The report of each phase by the name of its folder; None before its first step."""

    @classmethod
    def of_run(cls, run_dir: Path) -> "PhasesReport | None":
        """Read the reports in a run's folder; None for a run without phases."""
        phases = {folder.name: Report.of_run(folder) for folder in phase_folders(run_dir)}
        if not phases:
            return None
        known = [report for report in phases.values() if report]
        return cls(
            run_dir=str(run_dir),
            finished=all(report and report.finished for report in phases.values()),
            steps=sum(report.steps for report in known),
            tokens=sum(report.tokens for report in known),
            seconds=sum(report.total_seconds or report.seconds for report in known),
            phases=phases,
        )

    def write(self) -> None:
        """Write report.json and report.html into the run's folder, atomically."""
        folder = Path(self.run_dir)
        content = msgspec.json.format(msgspec.json.encode(self), indent=1)
        atomic_write(folder / REPORT_FILE, content + b"\n")
        page = page_templates().get_template("phases.html")
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        save_page(folder, page.render(**fields, page_file=PAGE_FILE))

    def summary(self) -> str:
        """The report in a few lines."""
        done = sum(report is not None and report.finished for report in self.phases.values())
        return facts(
            {
                "phases": f"{done} of {count_of(len(self.phases), 'phase')} finished, "
                f"{count_of(self.steps, 'step')}, {self.tokens:,} real tokens in "
                f"{self.seconds:,.1f} s",
                "report": str(Path(self.run_dir) / PAGE_FILE),
            }
        )
