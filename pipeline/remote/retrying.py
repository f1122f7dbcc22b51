"""Repeat failed requests: one loop for all of them, with counts; and threads for many requests.

The client itself does not retry reads, so each failure is counted here, and its cause can be logged
while it lasts. A request fails after `give_up_s` seconds of retries. That is less than the 600 s
after which NCCL kills a waiting run, so the error of the store comes first.
"""

import contextlib
import errno
import logging
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from tokenfeed.pipeline.errors import ConfigError, RemoteError

__all__ = ["Meter", "Timing", "Traffic", "few_threads", "persist", "results_of", "without_patience"]

T = TypeVar("T")
_TIMEOUT = "TOKENFEED_REMOTE_TIMEOUT"
_log = logging.getLogger(__name__)
_meters: "weakref.WeakSet[Meter]" = weakref.WeakSet()
"""All meters of this process."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long to wait for what; seconds."""

    give_up_s: float = 540.0
    """A request is repeated for so long, less up to a tenth for the last try."""
    warn_after_s: float = 10.0
    """A request that fails for so long is told of."""
    warn_every_s: float = 60.0
    first_wait_s: float = 0.2
    """Before the first repetition; each wait is twice the one before."""
    longest_wait_s: float = 8.0
    connect_s: float = 5.0
    read_s: float = 10.0
    """Without a byte, a connection counts as dead."""
    request_s: float = 60.0
    """For one request with its body."""
    upload_s: float = 240.0
    """For one request that sends much: four of 64 MiB at once by a network of 1.2 MB/s."""

    @property
    def uploading(self) -> Self:
        """The same for such requests: no byte comes back while they last."""
        return replace(self, read_s=self.upload_s, request_s=self.upload_s)

    @classmethod
    def from_environment(cls) -> Self:
        """Return the usual times, but for the time after which a request is given up, if one is
        set. No single request lasts longer than that.

        Raises:
            ConfigError: The variable is no number of seconds from 1 on.
        """
        said = os.environ.get(_TIMEOUT)
        if not said:
            return cls()
        try:
            give_up_s = float(said)
        except ValueError:
            give_up_s = math.nan
        if not 1 <= give_up_s < math.inf:
            raise ConfigError(f"{_TIMEOUT}={said}: expected seconds, at least 1, like 540.")
        usual = cls()
        return cls(
            give_up_s=give_up_s,
            connect_s=min(usual.connect_s, give_up_s),
            read_s=min(usual.read_s, give_up_s),
            request_s=min(usual.request_s, give_up_s),
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """What requests to a store came to."""

    requests: int = 0
    """Sent, repetitions among them."""
    bytes: int = 0
    """Of content, read and written."""
    retries: int = 0
    """Repetitions."""
    outage_s: float = 0.0
    """Time in which at least one request was being repeated."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.requests + other.requests,
            self.bytes + other.bytes,
            self.retries + other.retries,
            self.outage_s + other.outage_s,
        )


class Meter:
    """Counts the traffic of a store in this process; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = Traffic()
        self._failing = 0
        self._failing_since = 0.0
        self._told_at = -math.inf
        self.abandoned = threading.Event()
        """While it is set, failed requests are not repeated, because nobody needs the answers."""
        _meters.add(self)

    def add(self, traffic: Traffic) -> None:
        """Count more."""
        with self._lock:
            self._total += traffic

    def read(self) -> Traffic:
        """The count now; an outage counts when it is over."""
        return self._total

    def may_tell(self, every_s: float) -> bool:
        """Whether to warn now: of all requests that fail at once, one speaks for the others."""
        with self._lock:
            now = time.monotonic()
            if now - self._told_at < every_s:
                return False
            self._told_at = now
            return True

    @contextmanager
    def outage(self) -> Iterator[None]:
        """While a request is being repeated; several at once count as one."""
        with self._lock:
            if not self._failing:
                self._failing_since = time.monotonic()
            self._failing += 1
        try:
            yield
        finally:
            with self._lock:
                self._failing -= 1
                if not self._failing:
                    self._told_at = -math.inf
                    lasted = time.monotonic() - self._failing_since
                    self._total += Traffic(outage_s=lasted)


@contextmanager
def without_patience() -> Iterator[None]:
    """Inside the block, failed requests of this process are not repeated."""
    meters = list(_meters)
    for meter in meters:
        meter.abandoned.set()
    try:
        yield
    finally:
        for meter in meters:
            meter.abandoned.clear()


def persist(
    attempt: Callable[[], T],
    cause_of: Callable[[Exception], str],
    place: str,
    timing: Timing,
    meter: Meter,
) -> T:
    """Repeat `attempt` until it succeeds.

    Args:
        attempt: Does it once.
        cause_of: Says in one line why it failed, or raises where repetition is no use.
        place: The object as messages name it.
        timing: How long.
        meter: Where it is counted.

    Raises:
        RemoteError: It went on failing.
    """
    meter.add(Traffic(requests=1))
    started = time.monotonic()
    try:
        return attempt()
    except Exception as error:
        cause = cause_of(error)
    with meter.outage():
        return _repeat(attempt, cause_of, place, timing, meter, started, cause)


def _repeat(
    attempt: Callable[[], T],
    cause_of: Callable[[Exception], str],
    place: str,
    timing: Timing,
    meter: Meter,
    started: float,
    cause: str,
) -> T:
    tries, wait_s = 1, timing.first_wait_s
    while True:
        elapsed_s = time.monotonic() - started
        left_s = timing.give_up_s - min(timing.read_s, timing.give_up_s / 10) - elapsed_s
        if left_s <= 0:
            raise RemoteError(
                errno.ETIMEDOUT,
                f"failed for {elapsed_s:.0f} s, {tries} times, at last: {cause}. Mend that and "
                "start again: nothing is lost",
                place,
            )
        if elapsed_s >= timing.warn_after_s and meter.may_tell(timing.warn_every_s):
            end = (
                "" if timing.give_up_s == math.inf else f"; given up after {timing.give_up_s:.0f} s"
            )
            _log.warning("%s: fails for %.0f s now (%s)%s", place, elapsed_s, cause, end)
        pause_s = wait_s * random.uniform(0.5, 1) if wait_s < left_s else left_s
        if meter.abandoned.wait(pause_s):
            raise RemoteError(errno.ECANCELED, f"was broken off while it failed ({cause})", place)
        wait_s = min(2 * wait_s, timing.longest_wait_s)
        tries += 1
        meter.add(Traffic(requests=1, retries=1))
        try:
            return attempt()
        except Exception as error:
            cause = cause_of(error)


R = TypeVar("R")
_SUBMITTED = 10_000
"""Things that are given to the threads together: each takes memory until it is done."""


@contextlib.contextmanager
def few_threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads, which have ended when the block ends.

    After an error or Ctrl-C the threads start nothing more and repeat no request.
    """
    threads = ThreadPoolExecutor(number)
    try:
        yield threads
    except BaseException:
        with without_patience():
            threads.shutdown(cancel_futures=True)
        raise
    threads.shutdown()


def results_of(do: Callable[[T], R], things: Sequence[T], at_once: int) -> Iterator[R]:
    """Yield the result of `do` for each thing, in order; errors and Ctrl-C as in `few_threads`."""
    with few_threads(at_once) as threads:
        for first in range(0, len(things), _SUBMITTED):
            yield from threads.map(do, things[first : first + _SUBMITTED])
