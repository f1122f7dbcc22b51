"""`report RUN`: print a run's report and write its page."""

import dataclasses
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from tokenfeed.pipeline.text import facts
from tokenfeed.tools.shell.command_line import parse_command
from tokenfeed.tools.shell.console import print_json, run_command
from tokenfeed.trainer.config.run_config import PAGE_FILE
from tokenfeed.trainer.report.page import RunData, write_page
from tokenfeed.trainer.report.phases import PhasesReport

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Show:
    """Print the report of a run, and write its page report.html."""

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
        try:
            page = write_page(self.run_dir)
        except OSError as error:
            log.warning("%s: not written: %s", self.run_dir / PAGE_FILE, error.strerror)
            return 0
        if not self.json:
            print(facts({"page": str(page)}))
        return 0

    def _show_phases(self, found: PhasesReport) -> int:
        """Print the reports of the phases and of the run. Write the page of the run."""
        if self.json:
            print_json(dataclasses.asdict(found))
        for name, report in found.phases.items() if not self.json else ():
            print(f"{name}\n{report.summary() if report else 'not begun'}\n")
        if not self.json:
            print(found.summary(), flush=True)
        try:
            found.write()
        except OSError as error:
            log.warning("%s: not written: %s", self.run_dir / PAGE_FILE, error.strerror)
        return 0


def main() -> None:
    """Entry point of the `report` script."""
    run_command(lambda: parse_command(Show, "report", sys.argv[1:]).run())


if __name__ == "__main__":
    main()
