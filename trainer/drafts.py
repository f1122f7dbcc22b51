"""report.json while a run goes on: a killed run leaves what it had measured."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

from tokenfeed.trainer.report import Report

__all__ = ["DraftReports", "NoDrafts"]

_SECONDS_BETWEEN = 30.0
_MOST_SHARE = 0.001
"""Of the time, at most, that drafts take."""

_log = logging.getLogger(__name__)


class DraftReports:
    """Writes a report of a run now and then, marked as unfinished."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._next_s = 0.0
        self._make: Callable[[], Report] | None = None
        self._has_failed = False

    def write(self, make: Callable[[], Report]) -> None:
        """Write one, if the latest is old enough; a disk that is full is no reason to stop."""
        self._make, started_s = make, time.perf_counter()
        if started_s < self._next_s:
            return
        try:
            self._write(make)
        except OSError as error:
            if not self._has_failed:
                _log.warning("report.json cannot be written, training goes on: %s", error)
            self._has_failed = True
        taken_s = time.perf_counter() - started_s
        self._next_s = started_s + max(_SECONDS_BETWEEN, taken_s / _MOST_SHARE)

    def write_last(self) -> None:
        """Write what is known where a run ends by an error, if a draft was ever asked for. A device
        that has failed may tell nothing."""
        if self._make is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._write(self._make)

    def _write(self, make: Callable[[], Report]) -> None:
        dataclasses.replace(make(), finished=False).write(self._run_dir)


class NoDrafts(DraftReports):
    """What the ranks have that write nothing."""

    def write(self, make: Callable[[], Report]) -> None:
        """Rank 0 does."""
