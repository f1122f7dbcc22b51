"""The progress bar of a run.

The bar shows the encoded share of the input, in bytes of the files, so compression and unused
fields do not make it jump or stall. It is shown in terminals and notebooks. In other output, such
as the log of a job, a line a minute shows the same.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from tokenfeed.tools.jobs.crew import Done

if TYPE_CHECKING:
    import rich.progress


logger = logging.getLogger(__name__)

_LINE_SECONDS = 60
"""Seconds between two lines in output that is not a terminal."""


class Bar:
    """The progress bar of a run."""

    def __init__(self, sizes: Sequence[float]) -> None:
        """Begin with the size of each unit, in bytes."""
        self._num_units = len(sizes)
        self._units_done = self._tokens = 0
        self._total, self._done = sum(sizes), 0.0
        self._started = self._said = time.perf_counter()
        self._shown: rich.progress.Progress | None = None
        if _is_seen():
            self._shown = _make()
            self._shown.add_task("starting", total=self._total, speed="")

    def __enter__(self) -> Self:
        if self._shown:
            self._shown.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self._shown.stop()

    def advance(self, progress: Done) -> None:
        """Add an encoded part of a unit."""
        self._tokens += progress.num_tokens
        self._done = min(self._done + progress.weight_bytes, self._total)
        now = time.perf_counter()
        units = f"{self._units_done:,}/{self._num_units:,} units"
        speed = f"{self._tokens / (now - self._started) / 1e6:.2f} M tokens/s"
        if self._shown:
            (task,) = self._shown.tasks
            self._shown.update(task.id, completed=self._done, description=units, speed=speed)
        elif now - self._said >= _LINE_SECONDS and self._done:
            self._said, seconds = now, now - self._started
            left = timedelta(seconds=round(seconds * (self._total - self._done) / self._done))
            logger.info(
                "%s, %.0f%%, %.1f MB/s, %s, %s left",
                units,
                100 * self._done / self._total,
                self._done / 1e6 / seconds,
                speed,
                left,
            )

    def count_unit(self) -> None:
        """Count a finished unit."""
        self._units_done += 1
        self.advance(Done(0, 0))


@contextmanager
def bytes_read(name: str) -> Iterator[Callable[[int], None]]:
    """Show how many bytes of an input of unknown length were read.

    Yields:
        A function that is called with the number of further bytes.
    """
    if not _is_seen():
        said, total = time.perf_counter(), 0

        def say(num_bytes: int) -> None:
            nonlocal said, total
            total += num_bytes
            if time.perf_counter() - said >= _LINE_SECONDS:
                said = time.perf_counter()
                logger.info("reading %s: %.1f MB", name, total / 1e6)

        yield say
        return
    with _make() as shown:
        task = shown.add_task(f"reading {name}", total=None, speed="")
        yield lambda num_bytes: shown.update(task, advance=num_bytes)


def _is_seen() -> bool:
    """Return whether the output goes to a terminal or a notebook."""
    if sys.stderr and sys.stderr.isatty():
        return True
    if "ipykernel" not in sys.modules:
        return False
    from rich.console import Console

    return Console().is_jupyter


def _make() -> "rich.progress.Progress":
    from rich import progress  # 30 ms that only a terminal should cost
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TextColumn("{task.fields[speed]}"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    )
