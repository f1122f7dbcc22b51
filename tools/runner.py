"""Run units in processes of their own, show how far they are, and end cleanly whatever happens.

Processes are spawned, since a tokenizer's threads do not survive a fork, and take units from one
queue, the big ones first, so that no slow one is left for the end. Ctrl-C is the parent's to
handle; a worker whose parent is gone ends by itself: a killed run leaves nobody writing.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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

from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.tools.encode import Job, UnitEncoder
from tokenfeed.tools.journal import Journal, UnitResult
from tokenfeed.tools.tokenizer import TOKENIZER_FILE, TextTokenizer
from tokenfeed.tools.units import Unit

__all__ = ["run_units"]

_POLL_S = 0.2


def run_units(job: Job, units: tuple[Unit, ...], workers: int, journal: Journal) -> None:
    """Encode the units that the journal does not have yet, and enter each as it is done.

    Raises:
        TokenfeedError: A worker process was killed.
        KeyboardInterrupt: With a line that says what is kept.
    """
    missing = [unit for unit in units if unit.number not in journal.results]
    missing.sort(key=lambda unit: (-unit.weight_bytes, unit.number))
    if not missing:
        return
    bar = _Bar(missing)
    try:
        with _pool(job, min(workers, len(missing)), bar) as pool, bar:
            waiting = _submit(pool, missing)
            while waiting:
                done, waiting = concurrent.futures.wait(
                    waiting, _POLL_S, concurrent.futures.FIRST_COMPLETED
                )
                for future in done:
                    journal.append(future.result())
                bar.show(units_done=len(missing) - len(waiting))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_kept(units, journal)) from None
    except BrokenProcessPool:
        raise TokenfeedError(
            "a worker process was killed, perhaps for want of memory (then use fewer `--workers`); "
            + _kept(units, journal)
        ) from None


def _kept(units: tuple[Unit, ...], journal: Journal) -> str:
    return (
        f"{len(journal.results):,} of {len(units):,} units are finished and kept; the same command "
        "continues with the others."
    )


class _Bar:
    """The progress bar, and the counters in shared memory that the workers add to."""

    def __init__(self, units: list[Unit]) -> None:
        context = multiprocessing.get_context("spawn")
        self.num_bytes, self.num_tokens = context.Value("q", 0), context.Value("q", 0)
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
        tokens_per_s = self.num_tokens.value / (time.perf_counter() - self._started)
        self._progress.update(
            self._task,
            description=f"{units_done:,}/{self._num_units:,} units",
            completed=self.num_bytes.value,
            speed=f"{tokens_per_s / 1e6:.2f} M tokens/s",
        )


@contextlib.contextmanager
def _pool(job: Job, workers: int, bar: _Bar) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes are gone when the block ends, at once if it ends in an error."""
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        _start_worker,
        (job, bar.num_bytes, bar.num_tokens),
    )
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        raise
    pool.shutdown()


def _submit(pool: ProcessPoolExecutor, units: Iterable[Unit]) -> set[Future[UnitResult]]:
    """Queue the units. Processes start here and inherit that SIGINT is blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {pool.submit(_encode_unit, unit) for unit in units}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """What a worker process keeps from unit to unit."""

    def __init__(self, job: Job, num_bytes: Any, num_tokens: Any) -> None:
        path = job.folder / TOKENIZER_FILE
        tokenizer = TextTokenizer.load(path.read_bytes(), origin=path, end_token=job.end_token)
        self._encoder = UnitEncoder(job, tokenizer, self._count)
        self._num_bytes, self._num_tokens = num_bytes, num_tokens
        self._left_bytes = 0

    def encode(self, unit: Unit) -> UnitResult:
        self._left_bytes = unit.weight_bytes
        result = self._encoder.encode(unit)
        self._count(self._left_bytes, 0)
        return result

    def _count(self, num_bytes: int, num_tokens: int) -> None:
        """Add to the shared counters; a unit never counts for more than its weight, an estimate."""
        num_bytes = min(num_bytes, self._left_bytes)
        self._left_bytes -= num_bytes
        with self._num_bytes.get_lock():
            self._num_bytes.value += num_bytes
        with self._num_tokens.get_lock():
            self._num_tokens.value += num_tokens


_worker: _Worker
"""This process's worker: a pool can hand its processes nothing but arguments and globals."""


def _start_worker(job: Job, num_bytes: Any, num_tokens: Any) -> None:
    global _worker
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = _Worker(job, num_bytes, num_tokens)


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _encode_unit(unit: Unit) -> UnitResult:
    return _worker.encode(unit)
