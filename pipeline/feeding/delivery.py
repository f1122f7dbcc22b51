"""Return batches to the user, and count what the user has received.

`Feed` is an endless iterator of batches that runs ahead of the user. `Delivery.delivered` is what
the user has received: an immutable object that `next` replaces as its last action. So a signal
handler or another thread always reads fields of the same batch, and an interruption leaves either
the position before a batch, or the position after it and the batch returned.
"""

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from tokenfeed.pipeline.errors import LoaderError
from tokenfeed.pipeline.feeding.batch import Batch, BatchForm, Made, make_batches
from tokenfeed.pipeline.feeding.stats import Counters
from tokenfeed.pipeline.feeding.window_source import (
    InlineSource,
    WindowSource,
    WorkerPool,
    end_with_interpreter,
)
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.state import Delivered
from tokenfeed.pipeline.windows.maker import WindowMaker

if TYPE_CHECKING:
    import torch

    from tokenfeed.pipeline.feeding.transfer import Batches


class Feed:
    """Endless iterator of batches and their rounds."""

    def __init__(
        self,
        maker: WindowMaker,
        start: Position,
        device: "torch.device | None",
        form: BatchForm,
        *,
        num_workers: int,
        prefetch: int,
        at_once: int,
        timeout: float,
        counters: Counters,
    ) -> None:
        """Start nothing yet. The first `next` starts the workers. With a `device`, batches are
        copied to it. `prefetch` batches are ready ahead of the loop; on the host, batches are made
        together until they have `at_once` slots."""
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
        self._batches = (
            copy_ahead(source, copies, form, counters, prefetch)
            if copies
            else _on_host(source, form, counters, prefetch, at_once)
        )
        self._finalizer = weakref.finalize(self, _end, self._batches, self._pool)
        self.in_step = True
        """Whether the loader has counted the last batch. `Delivery.next` sets it to True."""

    def __next__(self) -> Made:
        self.in_step = False
        return next(self._batches)

    def can_go_on(self) -> bool:
        """Return whether the feed is at the position of the loader.

        It is not after Ctrl-C interrupted the feed or the loader, and not in a forked child,
        because the workers answer the parent.
        """
        return self.in_step and (self._pool is None or self._pool.is_ours())

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


def _on_host(
    source: WindowSource, form: BatchForm, counters: Counters, prefetch: int, at_once: int
) -> "Batches":
    """Yield batches. A step empties the caches, so a batch that is made right after another one
    takes a third of the time."""
    ahead: deque[Made] = deque()
    while True:
        if ahead and not source.is_ready():  # a finished batch never waits for a worker
            yield ahead.popleft()
            continue
        try:
            lease = source.take()
        except Exception:
            yield from ahead
            raise
        counters.add_window(lease.seconds, lease.ready, lease.fetched)
        new_slots = 0
        for batch, done in make_batches(lease.rank_slice, form):
            ahead.append((batch, done))
            new_slots += 0 if batch is None else batch.num_slots
            if done.ends_window:
                lease.release()  # before the training step: a worker can use the time
            if new_slots >= at_once or done.ends_window:
                new_slots = 0
                while len(ahead) > prefetch:
                    yield ahead.popleft()


class Delivery:
    """Returns the batches of a feed, in one thread at a time, and counts them."""

    _interpreter_ends = staticmethod(sys.is_finalizing)

    def __init__(self, delivered: Delivered) -> None:
        """Continue after `delivered`."""
        self.delivered = delivered
        """Everything that was delivered so far."""
        self.jumps = self.passes = 0
        """Number of calls of `go_on_from`, and of passes that have ended."""
        self.counters = Counters()
        self._feed: Feed | None = None
        self._user = _User()

    def __getstate__(self) -> dict[str, Any]:
        """A pickled copy, as another process gets it, starts its own feed."""
        return self.__dict__ | {"_feed": None, "_user": _User()}

    def next(self, start: Callable[[], Feed], epochs: int | None) -> Batch | None:
        """Return the next batch, or None after a window without any.

        Args:
            start: Makes a feed at the current position; called if no feed is running.
            epochs: Number of epochs in a pass; None for no end.

        Raises:
            LoaderError: Another thread is inside, or a signal handler was.

        Correct by the order of the attribute writes. A signal handler can run after every call, and
        can raise (KeyboardInterrupt) or use this loader. So all calls come first, on local names:
        `taken`, `delivered`, `passes`, the counters. A raise in this part ends the feed, and
        `self.delivered` still has the position before the batch: the batch comes again. If a
        handler used the loader meanwhile, `_feed` or `delivered` is another object, and `next`
        raises instead of overwriting the handler's position. The last lines make no call, so no
        handler can run between them: `delivered` moves to the position after the batch, the pass
        may end, the feed is marked as in step, and the thread's claim ends. Then the batch is
        returned.
        """
        self._user.take()
        try:
            started = time.perf_counter()
            before, feed = self.delivered, self._running(start)
            taken = next(feed, None)
            if taken is None:  # another thread or a handler closed it: a feed never ends
                end_with_interpreter()
                raise _interrupted()
            batch, done = taken
            delivered = before.after(done)
            passes = self.passes + _ends_pass(delivered.position, epochs)
            self.counters.add_batch(batch, time.perf_counter() - started, done.left_out)
            if self._feed is not feed or self.delivered is not before:
                raise _interrupted()
            self.delivered = delivered  # no calls from here on: signal handlers run after calls
            self.passes = passes
            feed.in_step = True
            self._user.holder = None
        except BaseException:
            self._end_feed()  # the position is unchanged, so the caller can retry
            self._user.end()
            raise
        return batch

    def go_on_from(self, delivered: Delivered) -> None:
        """Continue after the position of a loaded state."""
        with self._user:
            self._end_feed()
            self.delivered = delivered
            self.jumps += 1

    def close(self) -> None:
        """Stop the feed. The position stays."""
        if self._interpreter_ends():  # the feed was ended at exit, and modules are gone
            return
        with self._user:
            self._end_feed()

    def _running(self, start: Callable[[], Feed]) -> Feed:
        """Return the running feed, or start one at the current position."""
        if self._feed and not self._feed.can_go_on():
            self._end_feed()
        if self._feed is None:
            self._feed = start()
        return self._feed

    def _end_feed(self) -> None:
        if self._feed:
            self._feed.close()  # if interrupted, the feed stays set and is closed again
            self._feed = None


class Pass:
    """Iterator over the rest of a pass. Several iterators share its batches, and end together."""

    def __init__(self, delivery: Delivery, deliver: Callable[[], Batch | None]) -> None:
        """`deliver` returns the next batch of `delivery`; see `Delivery.next`."""
        self._delivery, self._deliver, self._ended_before = delivery, deliver, delivery.passes

    @property
    def has_ended(self) -> bool:
        """Whether the last batch of the pass was delivered."""
        return self._delivery.passes != self._ended_before

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        while not self.has_ended:
            if (batch := self._deliver()) is not None:
                return batch
        raise StopIteration


class _User:
    """Lets one thread at a time in. Another thread gets an error instead of waiting.

    The same thread may take it again. So if Ctrl-C prevented the release, the loader stays usable.
    """

    def __init__(self) -> None:
        self.holder: int | None = None

    def take(self) -> None:
        thread = threading.get_ident()
        if self.holder not in (None, thread):
            raise LoaderError(
                "another thread is using this loader. Iterate, load and close it in one thread and "
                "pass batches on from there, or make a loader for each thread; `state_dict`, "
                "`position` and `stats` work in any thread."
            )
        self.holder = thread

    def end(self) -> None:
        self.holder = None

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.end()


def _interrupted() -> LoaderError:
    return LoaderError(
        "a signal handler iterated, loaded, resized or closed this loader while the loop was "
        "inside `next`. Let the handler ask the loop to do that. Iteration continues at `position`."
    )


def _ends_pass(position: Position, epochs: int | None) -> bool:
    epoch, window, micro_batch = position
    return not (epochs is None or epoch % epochs or window or micro_batch)
