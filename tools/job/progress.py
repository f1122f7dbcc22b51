"""The progress bar of a run, and the counters in shared memory that its workers add to.

It moves with the part of the input that has been read and encoded, measured in bytes of the files,
so neither compression nor fields that nobody wants make it jump or stall.
"""

import multiprocessing
import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from tokenfeed.tools.corpus.units import Unit

__all__ = ["Bar", "Counters"]


class Counters:
    """What all workers have done together, in memory that each of them shares."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._weight_bytes: Any = context.Value("d", 0.0)
        self._tokens: Any = context.Value("q", 0)

    def add(self, weight_bytes: float, tokens: int) -> None:
        """Count finished work."""
        with self._weight_bytes.get_lock():
            self._weight_bytes.value += weight_bytes
        with self._tokens.get_lock():
            self._tokens.value += tokens

    @property
    def weight_bytes(self) -> float:
        """Weight of the input that is done."""
        return float(self._weight_bytes.value)

    @property
    def tokens(self) -> int:
        """Tokens written."""
        return int(self._tokens.value)


class Bar:
    """Shows how far a run is, on a terminal; elsewhere it is silent."""

    def __init__(self, units: list[Unit], counters: Counters) -> None:
        self._counters = counters
        self._num_units = len(units)
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        total = sum(unit.weight_bytes for unit in units)
        self._task = self._progress.add_task("starting", total=total, speed="")

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        self._progress.start()

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, *, units_done: int) -> None:
        """Draw what the counters say."""
        tokens_per_s = self._counters.tokens / (time.perf_counter() - self._started)
        self._progress.update(
            self._task,
            description=f"{units_done:,}/{self._num_units:,} units",
            completed=self._counters.weight_bytes,
            speed=f"{tokens_per_s / 1e6:.2f} M tokens/s",
        )
