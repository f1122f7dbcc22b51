"""Repeat failed requests: one loop for all of them, with counts; and threads for many requests.

The client itself does not retry reads, so each failure is counted here, and its cause can be logged
while it lasts. A request fails after `give_up_s` seconds of retries. That is less than the 600 s
after which NCCL kills a waiting run, so the error of the store comes first.
"""

import contextlib
import errno
import itertools
import logging
import math
import operator
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Self, TypeVar

from tokenfeed.pipeline.errors import ConfigError, RemoteError

T = TypeVar("T")
R = TypeVar("R")
_TIMEOUT = "TOKENFEED_REMOTE_TIMEOUT"
_log = logging.getLogger(__name__)
_abandoned = threading.Event()
"""While it is set, failed requests are not repeated, because nobody needs the answers."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Limits of requests and retries, in seconds."""

    give_up_s: float = 540.0
    """Retries of a request end after this time, less up to a tenth for the last attempt."""
    warn_after_s: float = 10.0
    """A request that fails for this long is logged."""
    warn_every_s: float = 60.0
    first_wait_s: float = 0.2
    """Wait before the first retry; each wait is twice as long as the one before."""
    longest_wait_s: float = 8.0
    connect_s: float = 5.0
    read_s: float = 10.0
    """A connection without a byte for this long counts as dead."""
    request_s: float = 60.0
    """Limit of one request with its body."""
    upload_s: float = 240.0
    """Limit of one large upload: enough for four of 64 MiB at once at 1.2 MB/s."""

    @property
    def uploading(self) -> Self:
        """Return the limits of uploads, during which the server sends no byte."""
        return replace(self, read_s=self.upload_s, request_s=self.upload_s)

    @classmethod
    def from_environment(cls) -> Self:
        """Return the default limits, with `give_up_s` of the environment if it is set. No single
        request lasts longer than `give_up_s`.

        Raises:
            ConfigError: The variable is not a number of seconds, at least 1.
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
    """Counts of requests to a store."""

    requests: int = 0
    """Number of requests sent, with retries."""
    bytes: int = 0
    """Bytes of content, read and written."""
    retries: int = 0
    """Number of retries."""
    outage_s: float = 0.0
    """Seconds in which at least one request was being retried."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, astuple(self), astuple(other)))

    def since(self, before: Self) -> Self:
        """Return the counts since `before`."""
        return type(self)(*map(operator.sub, astuple(self), astuple(before)))


class Meter:
    """Counts the traffic of a store in this process. Safe to use in many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = Traffic()
        self._failing = 0
        self._failing_since = 0.0
        self._warned_at = -math.inf

    def add(self, traffic: Traffic) -> None:
        """Add counts."""
        with self._lock:
            self._total += traffic

    def read(self) -> Traffic:
        """Return the current counts. An outage is counted when it is over."""
        return self._total

    def may_warn(self, every_s: float) -> bool:
        """Return whether to warn now. Several requests that fail at the same time warn once."""
        with self._lock:
            now = time.monotonic()
            if now - self._warned_at < every_s:
                return False
            self._warned_at = now
            return True

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Count the time inside the block as an outage. Blocks at the same time count as one."""
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
                    self._warned_at = -math.inf
                    lasted = time.monotonic() - self._failing_since
                    self._total += Traffic(outage_s=lasted)


@contextmanager
def without_patience() -> Iterator[None]:
    """Inside the block, failed requests of this process are not repeated."""
    _abandoned.set()
    try:
        yield
    finally:
        _abandoned.clear()


_random = random.SystemRandom()
"""The random numbers of the program do not depend on faults."""


def persist(
    attempt: Callable[[], T],
    cause_of: Callable[[Exception], str],
    place: str,
    timing: Timing,
    meter: Meter,
) -> T:
    """Repeat `attempt` until it succeeds.

    Args:
        attempt: Sends the request once.
        cause_of: Returns the cause of a failure in one line, or raises if a retry is useless.
        place: Name of the object in messages.
        timing: How long to wait and to retry.
        meter: Counts the requests.

    Raises:
        RemoteError: All attempts failed.
    """
    started, wait_s = time.monotonic(), timing.first_wait_s
    with contextlib.ExitStack() as outage:
        for tries in itertools.count(1):
            meter.add(Traffic(requests=1, retries=int(tries > 1)))
            try:
                return attempt()
            except Exception as error:
                cause = cause_of(error)
            if tries == 1:
                outage.enter_context(meter.outage())
            elapsed_s = time.monotonic() - started
            left_s = timing.give_up_s - min(timing.read_s, timing.give_up_s / 10) - elapsed_s
            if left_s <= 0:
                raise RemoteError(
                    errno.ETIMEDOUT,
                    f"failed for {elapsed_s:.0f} s, {tries} times, at last: {cause}. Repair that "
                    "and start again: nothing is lost",
                    place,
                )
            if elapsed_s >= timing.warn_after_s and meter.may_warn(timing.warn_every_s):
                is_endless = timing.give_up_s == math.inf
                end = "" if is_endless else f"; given up after {timing.give_up_s:.0f} s"
                _log.warning("%s: fails for %.0f s now (%s)%s", place, elapsed_s, cause, end)
            pause_s = wait_s * _random.uniform(0.5, 1) if wait_s < left_s else left_s
            if _abandoned.wait(pause_s):
                message = f"was cancelled while it failed ({cause})"
                raise RemoteError(errno.ECANCELED, message, place)
            wait_s = min(2 * wait_s, timing.longest_wait_s)
    raise AssertionError("unreachable")


_SUBMITTED = 10_000
"""Things submitted to the threads together. Each takes memory until it is done."""


@contextlib.contextmanager
def few_threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads, and wait for them at the end of the block.

    After an error or Ctrl-C the threads start no other work and retry no request.
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
    """Yield the result of `do` for each thing, in order. An error ends the iteration as in
    `few_threads`."""
    with few_threads(at_once) as threads:
        for first in range(0, len(things), _SUBMITTED):
            yield from threads.map(do, things[first : first + _SUBMITTED])
