"""`report RUN`: print a run's report and write its page. `report compare A B`: two runs side by
side."""

import dataclasses
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from rich import box
from rich.console import Console
from rich.table import Table

from tokenfeed.pipeline.facts import facts
from tokenfeed.tools.shell.command_line import parse_command
from tokenfeed.tools.shell.console import print_json, run_command
from tokenfeed.trainer.config.run_config import PAGE_FILE
from tokenfeed.trainer.report.compare import Row, compare
from tokenfeed.trainer.report.page import write_page
from tokenfeed.trainer.report.run_folder import RunData

log = logging.getLogger(__name__)

RunFolder = Annotated[Path, Meta(title="RUN", description="a path")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Show:
    """Print the report of a run, and write its page report.html. `report compare RUN RUN` compares
    two runs."""

    run_dir: RunFolder
    """Folder of a `train` run (finished, running or killed), or of a StallMeter report."""
    json: bool = False
    """Print report.json."""

    def run(self) -> int:
        """Print the report, then write the page. A page that cannot be written is a warning."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Compare:
    """Compare two runs: figures, stall by cause, and different settings. Losses are compared at the
    last step that both runs logged."""

    one: RunFolder
    """Folder of a run."""
    other: RunFolder
    """Folder of the other run. Changes are relative to the first run."""
    json: bool = False
    """Print the comparison as JSON."""

    def run(self) -> int:
        """Print the comparison."""
        found = compare(RunData.of_folder(self.one), RunData.of_folder(self.other))
        if self.json:
            print_json(dataclasses.asdict(found))
            return 0
        console = Console(markup=False, emoji=False)  # names of folders may have brackets
        console.print(self._table("", found.figures))
        console.print(self._table("share of the time", found.causes))
        if found.settings:
            console.print(self._table("settings that differ", found.settings))
        return 0

    def _table(self, title: str, rows: list[Row]) -> Table:
        table = Table(title, box=box.SIMPLE, header_style="bold", pad_edge=False)
        table.add_column(str(self.one), justify="right", overflow="fold")
        table.add_column(str(self.other), justify="right", overflow="fold")
        changes = any(row.change for row in rows)
        if changes:
            table.add_column("change", justify="right")
        for row in rows:
            table.add_row(row.name, row.one, row.other, *([row.change] if changes else []))
        return table


def main() -> None:
    """Entry point of the `report` script."""
    run_command(_run)


def _run() -> int:
    words = sys.argv[1:]
    if words[:1] == ["compare"]:
        return parse_command(Compare, "report compare", words[1:]).run()
    return parse_command(Show, "report", words).run()


if __name__ == "__main__":
    main()
