"""report.json while a run goes on: a killed run leaves what it had measured."""

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

from tokenfeed.trainer.report import Report

__all__ = ["DraftReports"]

_SECONDS_BETWEEN = 30.0
_MOST_SHARE = 0.001
"""Of the time, at most, that drafts take."""

_log = logging.getLogger(__name__)


class DraftReports:
    """Writes a report of a run now and then, marked as unfinished."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._next_s = 0.0
        self._has_failed = False

    def write(self, make: Callable[[], Report]) -> None:
        """Write one, if the latest is old enough; a disk that is full is no reason to stop."""
        started_s = time.perf_counter()
        if started_s < self._next_s:
            return
        try:
            dataclasses.replace(make(), finished=False).write(self._run_dir)
        except OSError as error:
            if not self._has_failed:
                _log.warning("report.json cannot be written, training goes on: %s", error)
            self._has_failed = True
        taken_s = time.perf_counter() - started_s
        self._next_s = started_s + max(_SECONDS_BETWEEN, taken_s / _MOST_SHARE)
