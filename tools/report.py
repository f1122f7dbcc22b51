"""`report RUN`: print a run's report and write its page. `report compare A B`: compare two runs."""

import dataclasses
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from tokenfeed.pipeline.text import facts
from tokenfeed.tools.shell.command_line import parse_command
from tokenfeed.tools.shell.console import print_json, run_command
from tokenfeed.trainer.config.run_config import PAGE_FILE
from tokenfeed.trainer.report.compare import COMPARISON_FILE, Comparison
from tokenfeed.trainer.report.page import RunData, write_page
from tokenfeed.trainer.report.phases import PhasesReport

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Show:
    """Print the report of a run, and write its page report.html.

    `report compare A B` compares two runs.
    """

    run_dir: Annotated[Path, Meta(title="RUN", description="a path")]
    """Folder of a `train` run (finished, running or killed), or of a StallMeter report."""
    json: bool = False
    """Print report.json."""

    def run(self) -> int:
        """Print the report, then write the page. A page that cannot be written is a warning."""
        if phases := PhasesReport.of_run(self.run_dir):
            return self._show_phases(phases)
        found = RunData.of_folder(self.run_dir)
        if self.json:
            print_json(dataclasses.asdict(found.report or found.stall))
        else:
            print(found.summary(), flush=True)
        _write(self.run_dir / PAGE_FILE, lambda: write_page(self.run_dir), is_silent=self.json)
        return 0

    def _show_phases(self, found: PhasesReport) -> int:
        """Print the reports of the phases and of the run. Write the page of the run."""
        if self.json:
            print_json(dataclasses.asdict(found))
        for name, report in found.phases.items() if not self.json else ():
            print(f"{name}\n{report.summary() if report else 'not begun'}\n")
        if not self.json:
            print(found.summary(), flush=True)
        _write(self.run_dir / PAGE_FILE, found.write, is_silent=True)
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Compare:
    """Compare two runs: verdicts, stall, causes, speed, and the settings that differ.

    The page is compare.html in the folder of B. A difference is called none if each figure lies
    within the 95 % interval of the other one.
    """

    a: Annotated[Path, Meta(title="A", description="a path")]
    """Folder of a `train` run, or of a StallMeter report."""
    b: Annotated[Path, Meta(title="B", description="a path")]
    """Folder of the run to compare with it."""
    json: bool = False
    """Print the comparison as JSON."""

    def run(self) -> int:
        """Print the comparison, then write the page. A page that cannot be written is a warning."""
        found = Comparison.of(self.a, self.b)
        if self.json:
            print_json(found.as_dict())
        else:
            print(found.summary(), flush=True)
        _write(self.b / COMPARISON_FILE, found.write, is_silent=self.json)
        return 0


def _write(page: Path, write: Callable[[], object], *, is_silent: bool) -> None:
    """Write a page, and print its path. If that fails, log a warning."""
    try:
        write()
    except OSError as error:
        log.warning("%s: not written: %s", page, error.strerror)
    else:
        if not is_silent:
            print(facts({"page": str(page)}))


def main() -> None:
    """Entry point of the `report` script."""
    words = sys.argv[1:]
    if words[:1] == ["compare"]:
        run_command(lambda: parse_command(Compare, "report compare", words[1:]).run())
    else:
        run_command(lambda: parse_command(Show, "report", words).run())


if __name__ == "__main__":
    main()
