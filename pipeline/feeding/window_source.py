"""Sources of windows: this process, or worker processes. Both return windows in order.

Any worker can make any window, because a window is a pure function of its number. So the number of
workers can change at any time without a change of the order. Each worker has a few slots of shared
memory. A window stays in its slot, and the loader reads it there, until its lease is released.
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
from functools import partial
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Protocol

from tokenfeed.pipeline.errors import LoaderError
from tokenfeed.pipeline.feeding.process import (
    END_S,
    SLOTS,
    Pending,
    Register,
    WorkerProcess,
    start_undisturbed,
)
from tokenfeed.pipeline.feeding.worker import Reply
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import RankSlice

if TYPE_CHECKING:
    from tokenfeed.pipeline.caching.traffic import Fetched

__all__ = [
    "InlineSource",
    "Lease",
    "WindowSource",
    "WorkerPool",
    "end_with_interpreter",
    "make_in_worker",
]


@dataclass(frozen=True, slots=True)
class Lease:
    """A slice, and the memory it stands in until it is released."""

    rank_slice: RankSlice
    seconds: float
    """Time that making it took a worker."""
    ready: int
    """Windows that were ready when it was taken, itself included."""
    release: Callable[[], None] = field(default=lambda: None)
    fetched: "Fetched | None" = None
    """What the workers took of stores since the lease before; None of local data."""


class WindowSource(Protocol):
    """Windows in order, without an end: epoch follows epoch."""

    def take(self) -> Lease:
        """The next window, waited for if it has to be."""
        ...

    def is_ready(self) -> bool:
        """Whether `take` would return at once."""
        ...

    def close(self) -> None:
        """End whatever runs."""


class InlineSource:
    """Makes each window when it is asked for, in this process."""

    def __init__(
        self,
        maker: WindowMaker,
        start: Position,
        stage: Callable[[RankSlice], RankSlice] | None = None,
    ) -> None:
        """`stage` puts a slice where a device can copy it from."""
        self._maker = maker
        self._next = start
        self._stage = stage

    def take(self) -> Lease:
        """The next window."""
        started = time.perf_counter()
        rank_slice = self._maker.make(self._next)
        if self._stage:
            rank_slice = self._stage(rank_slice)
        self._next = self._maker.plan.next_window(self._next)
        return Lease(rank_slice, time.perf_counter() - started, ready=0)

    def is_ready(self) -> bool:
        """Never: nothing is made ahead."""
        return False

    def close(self) -> None:
        """Nothing runs."""


def end_with_interpreter() -> None:
    """Where the interpreter ends, which has closed the source, end a daemon thread quietly."""
    if not threading.main_thread().is_alive():
        sys.exit()


_LONGEST_WAIT_S = 3600.0  # the system's own waits have a limit; a timeout may be longer, or inf


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
        """Start nothing yet: the first `take` does, and the workers go on from then.

        Args:
            maker: What to make.
            start: The first window, and how much of it was delivered before.
            num_workers: How many processes.
            timeout: Seconds to wait for a window before a worker counts as hung; one that waits
                for a store says so meanwhile, and the time begins anew.
            register: Called with the memory of each slot, to page-lock it for a device.
        """
        self._maker = maker
        self._next = start
        self._timeout = timeout
        self._register = register
        self._names = itertools.count()
        self._workers: list[WorkerProcess] = []
        self._pending: deque[Pending] = deque()  # in the order of the windows
        self._parent = os.getpid()
        self._closed = False
        self._changing = threading.RLock()  # the list of workers; a fork may find it locked
        self.num_workers = num_workers
        """Processes that get new work."""

    def is_ours(self) -> bool:
        """Whether this process made it; a fork of that one, which has a copy, did not."""
        return os.getpid() == self._parent

    def resize(self, num_workers: int) -> None:
        """Start more workers, or let some leave when what they made was used."""
        self.num_workers = num_workers
        self._staff()

    def take(self) -> Lease:
        """The next window.

        Raises:
            LoaderError: The worker died, or did not answer within the timeout; names the window.
            TokenfeedError: What the worker met.
        """
        with self._while_open():
            self._staff()
            head = self._pending[0]
            made = self._answer_of(head)
            ready = sum(1 for _ in itertools.takewhile(Pending.is_answered, self._pending))
            self._pending.popleft()
            memory = head.worker.slot_memory(head.slot, made.size, self._register)
            rank_slice = RankSlice.read(made.header, memoryview(memory))
            return Lease(rank_slice, made.seconds, ready, lambda: self._release(head), made.fetched)

    def is_ready(self) -> bool:
        """Whether the next window is made."""
        with self._while_open():
            self._drain(0)
            return bool(self._pending) and self._pending[0].is_answered()

    def close(self) -> None:
        """End all workers, within seconds whatever they do; again, if something broke into it."""
        self._closed = True
        with self._changing if self.is_ours() else contextlib.nullcontext():
            for worker in self._workers:
                worker.kill()
            deadline = time.monotonic() + END_S
            for worker in self._workers:
                worker.end(deadline)
            self._workers.clear()
            self._pending.clear()

    @contextlib.contextmanager
    def _while_open(self) -> Iterator[None]:
        """Explain what fails because another thread closed the pool."""
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
            "a signal handler or another thread closed the loader while it was read from. Let the "
            "loop close it."
        ) from None

    def _staff(self) -> None:
        """Start the workers that are missing, let go those that are too many; all get work."""
        staying = [worker for worker in self._workers if not worker.leaving]
        for worker in staying[self.num_workers :]:
            worker.leaving = True
        if (missing := self.num_workers - len(staying)) > 0:
            start_undisturbed(partial(self._start, missing))
        self._dismiss()
        self._assign()

    def _start(self, missing: int) -> None:
        with self._changing:
            for _ in range(missing):
                if not self._closed:
                    self._workers.append(WorkerProcess(next(self._names), self._maker))

    def _assign(self) -> None:
        """Give every free slot a window, workers with the least to do first."""
        while True:
            free = [worker for worker in self._workers if worker.free and not worker.leaving]
            if not free:
                return
            worker = max(free, key=lambda worker: len(worker.free))
            pending = Pending(self._next, worker, worker.free.pop())
            self._pending.append(pending)
            self._next = self._maker.plan.next_window(self._next)
            worker.begin(pending)

    def _answer_of(self, head: Pending) -> Reply:
        """Wait until a window is made."""
        asked_s = time.monotonic()
        while head.answer is None:
            heard_s = max(asked_s, head.worker.heard_s)
            self._drain(max(0.0, heard_s + self._timeout - time.monotonic()))
            heard_s = max(asked_s, head.worker.heard_s)
            if head.answer is None and time.monotonic() >= heard_s + self._timeout:
                raise LoaderError(
                    f"{head} did not answer within {self._timeout:g} s. The disk may hang; or "
                    "raise `timeout`."
                )
        if isinstance(head.answer, Reply):
            return head.answer
        if head.answer.error:
            raise head.answer.error
        raise RuntimeError(f"{head} failed:\n{head.answer.traceback}")

    def _drain(self, timeout: float) -> None:
        """Take in whatever workers have answered; wait for one answer at most `timeout` seconds."""
        busy = {worker.socket: worker for worker in self._workers if worker.tasks}
        for connection in wait(list(busy), min(timeout, _LONGEST_WAIT_S)):
            busy[connection].collect()  # type: ignore[index]

    def _release(self, pending: Pending) -> None:
        pending.worker.free.append(pending.slot)
        self._dismiss()
        if self._workers:
            self._assign()

    def _dismiss(self) -> None:
        """End workers that leave and whose slots are all free."""
        for worker in [w for w in self._workers if w.leaving and len(w.free) == SLOTS]:
            worker.end(time.monotonic() + END_S)
            self._workers.remove(worker)


def make_in_worker(maker: WindowMaker, position: Position, timeout: float) -> RankSlice:
    """Make one window in a new worker, which takes about half a second to start.

    For a process that must not start a client of a store, and needs a window only rarely.
    """
    pool = WorkerPool(maker, position, num_workers=1, timeout=timeout)
    try:
        return pool.take().rank_slice
    finally:
        pool.close()
