"""The feed: batches without an end from some position on, and what was measured on the way."""

import time
import weakref
from collections.abc import Generator

import torch

from tokenfeed.pipeline.feeding.batch import Batch, build_on_host
from tokenfeed.pipeline.feeding.pool import WorkerPool
from tokenfeed.pipeline.feeding.source import InlineSource, Lease, WindowSource
from tokenfeed.pipeline.feeding.stats import Counters
from tokenfeed.pipeline.feeding.transfer import copy_ahead, page_lock, stage
from tokenfeed.pipeline.feeding.tuner import Tuner
from tokenfeed.pipeline.planning.job import Job
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.share import RaggedBatch

__all__ = ["Feed"]


class Feed:
    """An iterator of batches, each with the micro-batch it was built from."""

    def __init__(
        self,
        job: Job,
        start: Position,
        device: torch.device,
        pad_id: int,
        *,
        num_workers: int,
        timeout: float,
        tuner: Tuner | None,
        counters: Counters,
    ) -> None:
        """Start nothing yet: the first batch does."""
        on_device = device.type == "cuda"
        self._pool: WorkerPool | None = None
        self._source: WindowSource
        if num_workers:
            self._source = self._pool = WorkerPool(
                job,
                start,
                num_workers=num_workers,
                timeout=timeout,
                register=page_lock if on_device else None,
            )
        else:
            self._source = InlineSource(job, start, stage if on_device else None)
        self._end = weakref.finalize(self, self._source.close)  # also when the interpreter ends
        measured = _Measured(self._source, self._pool, tuner, counters)
        self._batches = (
            copy_ahead(measured, device, pad_id) if on_device else _on_host(measured, pad_id)
        )
        self._in_step = True

    def __next__(self) -> tuple[Batch, RaggedBatch]:
        self._in_step = False
        return next(self._batches)

    def counted(self) -> None:
        """The loader has counted what it was given last."""
        self._in_step = True

    def can_go_on(self) -> bool:
        """Whether it stands where the loader stands: it may not, where Ctrl-C broke into either.

        Nor can it go on in a forked child: the workers answer the parent.
        """
        return self._in_step and (self._pool is None or self._pool.is_ours())

    @property
    def num_workers(self) -> int:
        """Processes that make windows."""
        return self._pool.num_workers if self._pool else 0

    def resize(self, num_workers: int) -> bool:
        """Have another number of workers; False where a new feed is needed for that."""
        if not self.can_go_on():
            return False
        if self._pool is None or num_workers == 0:
            return num_workers == self.num_workers
        self._in_step = False
        self._pool.resize(num_workers)
        self._in_step = True
        return True

    def close(self) -> None:
        """Wait for copies that still run, end the workers; again, if something broke into it."""
        self._batches.close()
        self._source.close()
        self._end.detach()


def _on_host(source: WindowSource, pad_id: int) -> Generator[tuple[Batch, RaggedBatch], None, None]:
    while True:
        lease = source.take()
        for ragged in lease.share.batches():
            batch = build_on_host(ragged, pad_id)
            if ragged.is_last:
                lease.release()  # before the step that follows: a worker can use the time
            yield batch, ragged


class _Measured:
    """A source, with a look at how long windows take to make and to use."""

    def __init__(
        self,
        source: WindowSource,
        pool: WorkerPool | None,
        tuner: Tuner | None,
        counters: Counters,
    ) -> None:
        self._source = source
        self._pool, self._tuner = pool, tuner
        self._counters = counters
        self._taken_s: float | None = None

    def take(self) -> Lease:
        """The next window."""
        asked_s = time.perf_counter()
        lease = self._source.take()
        if self._tuner and self._pool and self._taken_s is not None:
            self._tuner.add(made_s=lease.seconds, used_s=asked_s - self._taken_s)
            suggested = self._tuner.suggest(self._pool.num_workers)
            if suggested != self._pool.num_workers:
                self._pool.resize(suggested)
        self._counters.add_window(lease.seconds, lease.ready)
        self._taken_s = time.perf_counter()
        return lease

    def is_ready(self) -> bool:
        """Whether `take` would return at once."""
        return self._source.is_ready()

    def close(self) -> None:
        """End the source."""
        self._source.close()
