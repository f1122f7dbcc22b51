"""Sources of windows: this process, or worker processes. Both return windows in order.

Any worker can make any window, because a window is a pure function of its number. So the order does
not depend on the number of workers. Each worker has a few buffers of shared memory. A window stays
in its buffer, and the loader reads it there, until its lease is released.
"""

import contextlib
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Protocol

from tokenfeed.pipeline.errors import LoaderError, TokenfeedError
from tokenfeed.pipeline.feeding.worker import (
    NEEDS_NONE,
    Pending,
    Register,
    Reply,
    WorkerProcess,
)
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.processes import undisturbed
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import RankSlice

if TYPE_CHECKING:
    from tokenfeed.pipeline.caching.node import Fetched


COPIES_AHEAD = 2
"""Default number of micro-batches copied to a device ahead of use."""
END_S = 5.0
"""Seconds to wait for killed workers. A worker that hangs in the kernel ends when its disk answers;
nothing waits longer for it."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A slice in a buffer that stays reserved until `release` is called."""

    rank_slice: RankSlice
    seconds: float
    """Seconds that making the slice took."""
    ready: int
    """Number of windows ready when this one was taken, including it."""
    release: Callable[[], None] = field(default=lambda: None)
    fetched: "Fetched | None" = None
    """Counts of reads from stores since the last lease; None for local data."""


class WindowSource(Protocol):
    """Endless source of windows, in order, over all epochs."""

    def take(self) -> Lease:
        """Return the next window; wait until it is made."""
        ...

    def is_ready(self) -> bool:
        """Whether `take` would return at once."""
        ...


class InlineSource:
    """Makes each window in `take`, in this process."""

    def __init__(
        self,
        maker: WindowMaker,
        start: Position,
        stage: Callable[[RankSlice], RankSlice] | None = None,
    ) -> None:
        """`stage` moves a slice to page-locked memory for a device; None for no device."""
        self._maker = maker
        self._next = start
        self._stage = stage

    def take(self) -> Lease:
        """Return the next window."""
        started = time.perf_counter()
        rank_slice = self._maker.make(self._next)
        if self._stage:
            rank_slice = self._stage(rank_slice)
        self._next = self._maker.plan.next_window(self._next)
        return Lease(rank_slice, time.perf_counter() - started, ready=0)

    def is_ready(self) -> bool:
        """Return False: nothing is made ahead."""
        return False


def end_with_interpreter() -> None:
    """End a daemon thread silently if the interpreter is ending: exit has closed the source."""
    if not threading.main_thread().is_alive():
        sys.exit()


_LONGEST_WAIT_S = 3600.0  # the system call has a limit; `timeout` may be longer, or inf


class WorkerPool:
    """A `WindowSource` of worker processes."""

    def __init__(
        self,
        maker: WindowMaker,
        start: Position,
        *,
        num_workers: int,
        timeout: float,
        register: Register | None = None,
    ) -> None:
        """Start nothing yet. The first `take` starts the workers.

        Args:
            maker: Makes the windows.
            start: The first window, and the number of its micro-batches to skip.
            num_workers: Number of processes.
            timeout: Seconds without an answer after which a worker counts as hung.
            register: Called with the memory of each buffer, to page-lock it for a device.
        """
        self._maker = maker
        self._next = start
        self._timeout = timeout
        self._register = register
        self._workers: list[WorkerProcess] = []
        self._pending: deque[Pending] = deque()  # in window order
        self._parent = os.getpid()
        self._closed = False
        self._changing = threading.RLock()  # guards `_workers`; a fork may find it locked
        self._num_workers = num_workers

    def is_ours(self) -> bool:
        """Return whether this process created the pool. It is False in a forked child."""
        return os.getpid() == self._parent

    def take(self) -> Lease:
        """Return the next window.

        Raises:
            LoaderError: The worker died or did not answer within the timeout. The message names the
                window.
            TokenfeedError: An error in the worker, such as a damaged shard.
        """
        with self._while_open():
            if len(self._workers) < self._num_workers:
                self._start()
            self._assign()
            head = self._pending[0]
            made = self._answer_of(head)
            ready = sum(1 for _ in itertools.takewhile(lambda each: each.answer, self._pending))
            self._pending.popleft()
            memory = head.worker.buffer_memory(head.buffer, made.size, self._register)
            rank_slice = RankSlice.read(memoryview(memory))
            return Lease(rank_slice, made.seconds, ready, lambda: self._release(head), made.fetched)

    def is_ready(self) -> bool:
        """Return whether the next window is ready."""
        with self._while_open():
            self._drain(0)
            return bool(self._pending and self._pending[0].answer)

    def close(self) -> None:
        """Kill all workers, within seconds. Call it again if it was interrupted."""
        self._closed, is_ours = True, self.is_ours()
        with self._changing if is_ours else contextlib.nullcontext():
            for worker in self._workers if is_ours else ():
                worker.child.kill()
            deadline = time.monotonic() + END_S
            for worker in self._workers:
                worker.end(deadline, is_ours=is_ours)
            self._workers.clear()
            self._pending.clear()

    @contextlib.contextmanager
    def _while_open(self) -> Iterator[None]:
        """Raise a clear error if another thread closed the pool inside the block."""
        try:
            self._check_open()
            yield
        except Exception:
            self._check_open()
            raise

    def _check_open(self) -> None:
        if not self._closed:
            return
        end_with_interpreter()
        raise LoaderError(
            "a signal handler or another thread closed the loader during `next`. Let the loop "
            "close it."
        ) from None

    def _start(self) -> None:
        """Start the workers that are missing.

        Raises:
            LoaderError: The system refuses something that a worker needs.
        """

        def start() -> None:
            with self._changing:
                while not self._closed and len(self._workers) < self._num_workers:
                    self._workers.append(WorkerProcess(len(self._workers), self._maker))

        try:
            undisturbed(start)
        except RuntimeError as error:
            if isinstance(error, LoaderError):
                raise
            raise LoaderError(f"loader workers cannot be started: {error}. {NEEDS_NONE}") from error

    def _assign(self) -> None:
        """Assign a window to every free buffer, starting with the worker with most free buffers."""
        while free := [worker for worker in self._workers if worker.free]:
            worker = max(free, key=lambda worker: len(worker.free))
            self._pending.append(worker.begin(self._next))
            self._next = self._maker.plan.next_window(self._next)

    def _answer_of(self, head: Pending) -> Reply:
        """Wait until a window is made; return the reply."""
        give_up_s = time.monotonic() + self._timeout
        while head.answer is None:
            self._drain(max(0.0, give_up_s - time.monotonic()))
            if head.answer is None and time.monotonic() >= give_up_s:
                raise LoaderError(
                    f"{head} did not answer within {self._timeout:g} s. The disk may hang. If "
                    "windows take longer, raise `timeout`."
                )
        if isinstance(head.answer, Reply):
            return head.answer
        error = head.answer.error
        if isinstance(error, TokenfeedError):
            raise error
        notes = "\n".join(getattr(error, "__notes__", []))
        raise RuntimeError(f"{head} failed:\n{notes}") from error

    def _drain(self, timeout: float) -> None:
        """Collect all answers of workers; wait at most `timeout` seconds for the first."""
        busy = {worker.child.fileno(): worker for worker in self._workers if worker.tasks}
        for ready in wait(list(busy), min(timeout, _LONGEST_WAIT_S)):
            busy[ready].collect()  # type: ignore[index]

    def _release(self, pending: Pending) -> None:
        pending.worker.free.append(pending.buffer)
        self._assign()


def make_in_worker(maker: WindowMaker, position: Position, timeout: float) -> RankSlice:
    """Make one window in a new worker, which takes about half a second to start.

    For a process that must not start a client of a store, and needs a window only rarely.
    """
    pool = WorkerPool(maker, position, num_workers=1, timeout=timeout)
    try:
        return pool.take().rank_slice
    finally:
        pool.close()
