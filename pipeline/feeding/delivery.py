"""Delivery: batches given out one after the other, each counted at the moment it is given out.

The feed runs ahead of what the user has; this knows what the user has. That is one value which
never changes and is swapped in whole, as the last thing before a batch is out. So a signal handler
or another thread reads what belongs together, and whatever breaks in finds either the position
before a batch, or the batch given out.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from tokenfeed.pipeline.errors import LoaderError
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.feed import Feed
from tokenfeed.pipeline.feeding.stats import Counters
from tokenfeed.pipeline.feeding.window_source import end_with_interpreter
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.state import Delivered

__all__ = ["Delivery", "Pass"]


class Delivery:
    """Gives out the batches of a feed, in one thread at a time, and knows which they were."""

    _interpreter_ends = staticmethod(sys.is_finalizing)

    def __init__(self, delivered: Delivered) -> None:
        """Go on after `delivered`."""
        self.delivered = delivered
        """What was given out, up to now."""
        self.counters = Counters()
        self._feed: Feed | None = None
        self._turn = _Turn()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, as another process gets it, starts a feed of its own."""
        return self.__dict__ | {"_feed": None, "_turn": _Turn()}

    @property
    def num_workers(self) -> int | None:
        """Workers of the feed; None where there is no feed."""
        feed = self._feed
        return feed.num_workers if feed else None

    def next(self, start: Callable[[], Feed], epochs: int | None) -> tuple[Batch, bool]:
        """The next batch, and whether a pass ends with it.

        Args:
            start: Makes a feed that goes on from the present position, if none is running.
            epochs: Epochs of a pass; None for no end.

        Raises:
            LoaderError: Another thread is in here, or a signal handler was.
        """
        self._turn.take()
        try:
            started = time.perf_counter()
            before, feed = self.delivered, self._running(start)
            taken = next(feed, None)
            if taken is None:  # somebody ended it: a feed has no end of its own
                end_with_interpreter()
                raise _broken_into()
            batch, ragged = taken
            delivered = before.after(ragged.round)
            ends_pass = _ends_pass(delivered.position, epochs)
            self.counters.add_batch(batch, time.perf_counter() - started)
            if self._feed is not feed or self.delivered is not before:
                raise _broken_into()
            self.delivered = delivered  # no call from here on: signal handlers run after calls
            feed.in_step = True
            self._turn.holder = None
        except BaseException:
            self._end_feed()  # whoever mends the cause can go on: the position stayed
            self._turn.end()
            raise
        return batch, ends_pass

    def resize(self, num_workers: int) -> None:
        """Have the feed use another number of workers."""
        with self._turn:
            if self._feed and not self._feed.resize(num_workers):
                self._end_feed()

    def go_on_from(self, delivered: Delivered) -> None:
        """Continue after what another run has delivered."""
        with self._turn:
            self._end_feed()
            self.delivered = delivered

    def close(self) -> None:
        """End the feed. The position stays."""
        if self._interpreter_ends():  # its exit has ended the feed, and modules are gone
            return
        with self._turn:
            self._end_feed()

    def _running(self, start: Callable[[], Feed]) -> Feed:
        """Return the running feed, or start one at the present position."""
        if self._feed and not self._feed.can_go_on():
            self._end_feed()
        if self._feed is None:
            self._feed = start()
        return self._feed

    def _end_feed(self) -> None:
        if self._feed:
            self._feed.close()  # again, where something broke into it: until then it is not used
            self._feed = None


class Pass:
    """What is left of a pass, batch by batch."""

    def __init__(self, deliver: Callable[[], tuple[Batch, bool]]) -> None:
        """`deliver` gives a batch, and says whether the pass ends with it."""
        self._deliver = deliver
        self._has_ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._has_ended:
            raise StopIteration
        batch, self._has_ended = self._deliver()
        return batch


class _Turn:
    """Held by one thread at a time; another one is refused instead of waiting.

    The thread that holds it may take it again, so that where Ctrl-C kept it from being given back
    nobody is locked out for good.
    """

    def __init__(self) -> None:
        self.holder: int | None = None

    def take(self) -> None:
        thread = threading.get_ident()
        if self.holder not in (None, thread):
            raise LoaderError(
                "another thread is using this loader. Iterate, load and close it in one thread and "
                "hand batches on from there, or make a loader for each thread; `state_dict`, "
                "`position` and `stats` work in any."
            )
        self.holder = thread

    def end(self) -> None:
        self.holder = None

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.end()


def _broken_into() -> LoaderError:
    return LoaderError(
        "a signal handler iterated, loaded, resized or closed this loader while the loop was "
        "inside `next`. Let the handler ask the loop to do that; iterating goes on from `position`."
    )


def _ends_pass(position: Position, epochs: int | None) -> bool:
    epoch, window, micro_batch = position
    return not (epochs is None or epoch % epochs or window or micro_batch)
