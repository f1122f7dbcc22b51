"""The feed: an endless iterator of batches from a position on.

With num_workers="auto", it measures how many workers keep up with the loop. A worker makes a window
in d seconds, and the loop uses one in c seconds (without waiting), so d / c workers keep up. Time
waiting for a core is not part of d, because more workers would increase it. The order does not
depend on the number of workers.
"""

import contextlib
import statistics
import time
import weakref
from collections import deque
from math import ceil
from typing import TYPE_CHECKING

from tokenfeed.pipeline.feeding.batch import Batch, BatchForm, build_on_host
from tokenfeed.pipeline.feeding.stats import Counters
from tokenfeed.pipeline.feeding.window_source import InlineSource, Lease, WindowSource, WorkerPool
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import RaggedBatch

if TYPE_CHECKING:
    import torch

    from tokenfeed.pipeline.feeding.transfer import Batches


_HEADROOM = 1.25  # one worker too many costs memory; one too few leaves the GPU idle
_DEAD_BAND = 0.75  # workers leave only if fewer than this share of them would keep up
_EVERY = 4  # windows between changes: windows in the queue were made by the former number
_KEPT = 8


class Tuner:
    """Suggests a number of workers after each window."""

    def __init__(self, most: int) -> None:
        """`most` is the largest number of workers: this rank's share of the cores."""
        self._most = most
        self._made_s: deque[float] = deque(maxlen=_KEPT)
        self._used_s: deque[float] = deque(maxlen=_KEPT)
        self._until_change = _EVERY

    def add(self, made_s: float, used_s: float) -> None:
        """Add a window: the seconds to make it, and the seconds that the loop used it for."""
        self._made_s.append(made_s)
        self._used_s.append(used_s)
        self._until_change -= 1

    def suggest(self, num_workers: int) -> int:
        """Return the number of workers that keep up, if there are `num_workers` now."""
        if self._until_change > 0:
            return num_workers
        self._until_change = _EVERY
        made, used = statistics.median(self._made_s), statistics.median(self._used_s)
        wanted = made * _HEADROOM / max(used, 1e-9)
        needed = max(1, min(ceil(min(wanted, self._most)), self._most))
        if _DEAD_BAND * (num_workers - 1) < wanted < num_workers:
            return min(
                num_workers, self._most
            )  # one worker less might keep up: avoid frequent changes
        return needed


class Feed:
    """Endless iterator of (batch, ragged micro-batch it was built from)."""

    def __init__(
        self,
        maker: WindowMaker,
        start: Position,
        device: "torch.device | None",
        form: BatchForm,
        *,
        num_workers: int,
        timeout: float,
        tuner: Tuner | None,
        counters: Counters,
    ) -> None:
        """Start nothing yet. The first `next` starts the workers. With a `device`, batches are
        copied to it."""
        copies = page_lock = None
        if device is not None:
            from tokenfeed.pipeline.feeding.transfer import PageLock, copy_ahead, copy_stream

            copies, page_lock = copy_stream(device), PageLock(device, counters)
        self._pool: WorkerPool | None = None
        if num_workers:
            register = page_lock.lock if page_lock else None
            self._pool = WorkerPool(
                maker, start, num_workers=num_workers, timeout=timeout, register=register
            )
        source = self._pool or InlineSource(maker, start, page_lock.stage if page_lock else None)
        measured = _Measured(source, counters, self._pool, tuner)
        self._batches = copy_ahead(measured, copies, form) if copies else _on_host(measured, form)
        self._finalizer = weakref.finalize(self, _end, self._batches, self._pool)
        self.in_step = True
        """Whether the loader has counted the last batch. `Delivery.next` sets it to True."""

    def __next__(self) -> tuple[Batch, RaggedBatch]:
        self.in_step = False
        return next(self._batches)

    def can_go_on(self) -> bool:
        """Return whether the feed is at the position of the loader.

        It is not after Ctrl-C interrupted the feed or the loader, and not in a forked child,
        because the workers answer the parent.
        """
        return self.in_step and (self._pool is None or self._pool.is_ours())

    @property
    def num_workers(self) -> int:
        """Number of worker processes."""
        return self._pool.num_workers if self._pool else 0

    def close(self) -> None:
        """Wait for running copies and stop the workers. Call it again if it was interrupted."""
        self.in_step = False
        _end(self._batches, self._pool)
        self._finalizer.detach()


def _end(batches: "Batches", pool: WorkerPool | None) -> None:
    """Close `batches`, which waits for copies from the memory of the workers; then close the pool.

    It runs when a feed is closed or garbage-collected and when the interpreter ends; a second call
    does nothing. A daemon thread may still be inside `batches`: it ends when it finds the pool
    closed.
    """
    try:
        with contextlib.suppress(ValueError):  # a daemon thread is inside
            batches.close()
    finally:
        if pool:
            pool.close()


def _on_host(source: WindowSource, form: BatchForm) -> "Batches":
    while True:
        lease = source.take()
        for ragged in lease.rank_slice.batches():
            batch = build_on_host(ragged, form)
            if ragged.is_last:
                lease.release()  # before the training step: a worker can use the time
            yield batch, ragged


class _Measured:
    """A source that measures how long windows take to make and to use, and adjusts the workers."""

    def __init__(
        self, source: WindowSource, counters: Counters, pool: WorkerPool | None, tuner: Tuner | None
    ) -> None:
        self._source, self._counters, self._pool = source, counters, pool
        self._tuner = tuner
        self._taken_s: float | None = None
        self.is_ready = source.is_ready

    def take(self) -> Lease:
        """Return the next window."""
        asked_s = time.perf_counter()
        lease = self._source.take()
        if self._pool and self._tuner and self._taken_s is not None:
            self._tuner.add(lease.seconds, asked_s - self._taken_s)
            suggested = self._tuner.suggest(self._pool.num_workers)
            if suggested != self._pool.num_workers:
                self._pool.resize(suggested)
        self._counters.add_window(lease.seconds, lease.ready, lease.fetched)
        self._taken_s = time.perf_counter()
        return lease
