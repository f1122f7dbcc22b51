"""Stall: time in which the device has nothing of the training to run, split by cause.

Only brackets in stream order are measured: `with stall.cause("data"): batch = next(feed)`. Nothing
of the training is queued inside a bracket, so the time between its two marks on the device's own
clock *is* idle time of that cause: zero while the GPU is still behind the host, however long the
host waited. Never host time in `next()`, which would blame a loader that is merely ahead.

The marks form one chain, from the meter's making to its latest step, and the meter sums the links
between neighbours. The causes therefore can never exceed the wall time. It never synchronises:
links are added up once their events have passed.
The price: idle *inside* forward and backward (a GPU faster than the host can launch) is not seen.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

import torch

from tokenfeed.pipeline.feeding.devices import accelerator

__all__ = [
    "CAUSES",
    "Cause",
    "Clock",
    "EventClock",
    "HostClock",
    "StallMeter",
    "StallReading",
    "make_meter",
    "warmup_steps",
]

Cause = Literal["data", "log", "checkpoint", "evaluation"]
CAUSES: tuple[Cause, ...] = get_args(Cause)

_WARMUP_STEPS = 5

Mark = TypeVar("Mark")


class Clock(Protocol[Mark]):
    """Puts marks into the device's queue of work, and tells the time between them."""

    method: str
    """One sentence for the report: what is measured, and what is not seen."""

    def mark(self) -> Mark:
        """Queue a mark behind all work queued so far."""
        ...

    def passed(self, mark: Mark) -> bool:
        """Whether the device has reached the mark; never waits for it."""
        ...

    def seconds(self, earlier: Mark, later: Mark) -> float:
        """Device time between two neighbouring marks that it has passed."""
        ...

    def recycle(self, mark: Mark) -> None:
        """Take back a mark that will not be asked about again."""
        ...


class HostClock:
    """The clock of a CPU: the host does the work itself, so its time is the device's time."""

    method = (
        "host clock on the CPU: seconds the training thread spent in data, log, checkpoint and "
        "evaluation instead of in steps"
    )

    def mark(self) -> float:
        """The time now."""
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        """Always: what the host has queued, it has done."""
        return True

    def seconds(self, earlier: float, later: float) -> float:
        """The difference."""
        return later - earlier

    def recycle(self, mark: float) -> None:
        """Nothing to take back."""


class EventClock:
    """The clock of a GPU: timing events on the current stream, kept in a pool.

    Events are resolved with `query`, never waited for. An elapsed time is a 32-bit float of
    milliseconds, exact to microseconds only when short: hence neighbours only.
    """

    method = (
        "events around data, log, checkpoint and evaluation: GPU time in which nothing of the "
        "training was queued; idle time inside forward, backward and optimizer is not seen"
    )

    def __init__(self, device: torch.device) -> None:
        self._new_event = partial(accelerator(device).module.Event, enable_timing=True)
        self._pool: list[torch.Event] = []

    def mark(self) -> torch.Event:
        """Record an event on the current stream."""
        event = self._pool.pop() if self._pool else self._new_event()
        event.record()
        return event

    def passed(self, mark: torch.Event) -> bool:
        """Whether the event has happened."""
        return bool(mark.query())

    def seconds(self, earlier: torch.Event, later: torch.Event) -> float:
        """GPU time between two events."""
        return float(earlier.elapsed_time(later)) / 1e3

    def recycle(self, mark: torch.Event) -> None:
        """Keep the event for a later mark."""
        self._pool.append(mark)


@dataclass(frozen=True, kw_only=True, slots=True)
class StallReading:
    """What whole steps after the warm-up cost, and how much of it was stall."""

    steps: int
    tokens: int
    """Real tokens trained in these steps."""
    seconds: float
    """Wall time of these steps on the device's clock, stall included."""
    cause_seconds: dict[Cause, float]

    @property
    def tokens_per_s(self) -> float:
        """Real tokens per second of wall time; 0 before the first measured step."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def cause_fractions(self) -> dict[Cause, float]:
        """Share of the wall time by cause; all 0 before the first measured step."""
        return {
            cause: seconds / self.seconds if self.seconds else 0.0
            for cause, seconds in self.cause_seconds.items()
        }

    @property
    def fraction(self) -> float:
        """Share of the wall time that was stall of any cause."""
        return sum(self.cause_fractions.values())

    def since(self, earlier: "StallReading") -> "StallReading":
        """The part of this reading that came after an earlier one of the same meter."""
        return StallReading(
            steps=self.steps - earlier.steps,
            tokens=self.tokens - earlier.tokens,
            seconds=self.seconds - earlier.seconds,
            cause_seconds={
                cause: seconds - earlier.cause_seconds[cause]
                for cause, seconds in self.cause_seconds.items()
            },
        )


@dataclass(frozen=True, slots=True)
class _Link(Generic[Mark]):
    """The phase of device time that ends at `end`; `cause` is None where it is training."""

    end: Mark
    cause: Cause | None = None
    step_tokens: int | None = None
    """Set where a step ends here."""


class StallMeter(Generic[Mark]):
    """Adds up where the device's time goes, from bracket to bracket and step to step.

    The window reaches from the end of the last warm-up step to the end of the latest step whose
    marks have passed. Brackets after a step belong to the next one: what follows the last step
    (the final checkpoint) is outside.
    """

    def __init__(self, clock: Clock[Mark], skipped_steps: int) -> None:
        self.method = clock.method
        self._clock = clock
        self._skipped_steps = skipped_steps
        self._links: deque[_Link[Mark]] = deque()
        self._last = clock.mark()
        self._open_seconds = 0.0
        self._open_causes = _no_seconds()
        self._steps = self._tokens = 0
        self._seconds = 0.0
        self._causes = _no_seconds()

    @contextlib.contextmanager
    def cause(self, name: Cause) -> Iterator[None]:
        """Bracket code that queues nothing of the training; brackets do not nest."""
        self._links.append(_Link(self._clock.mark()))
        try:
            yield
        finally:
            self._links.append(_Link(self._clock.mark(), cause=name))

    def mark_step(self, tokens: int) -> None:
        """Say that a step of so many real tokens has been queued."""
        self._links.append(_Link(self._clock.mark(), step_tokens=tokens))
        self._resolve()

    def read(self) -> StallReading:
        """What is known now, without waiting for the device."""
        self._resolve()
        return StallReading(
            steps=self._steps,
            tokens=self._tokens,
            seconds=self._seconds,
            cause_seconds=dict(self._causes),
        )

    def _resolve(self) -> None:
        while self._links and self._clock.passed(self._links[0].end):
            link = self._links.popleft()
            seconds = self._clock.seconds(self._last, link.end)
            self._clock.recycle(self._last)
            self._last = link.end
            self._open_seconds += seconds
            if link.cause is not None:
                self._open_causes[link.cause] += seconds
            if link.step_tokens is not None:
                self._close_step(link.step_tokens)

    def _close_step(self, tokens: int) -> None:
        if self._skipped_steps:
            self._skipped_steps -= 1
        else:
            self._steps += 1
            self._tokens += tokens
            self._seconds += self._open_seconds
            for cause, seconds in self._open_causes.items():
                self._causes[cause] += seconds
        self._open_seconds, self._open_causes = 0.0, _no_seconds()


def make_meter(device: torch.device, skipped_steps: int) -> StallMeter[Any]:
    """A meter on the clock of `device`."""
    if device.type == "cpu":
        return StallMeter(HostClock(), skipped_steps)
    return StallMeter(EventClock(device), skipped_steps)


def warmup_steps(steps: int) -> int:
    """How many of a session's steps to leave out: workers start, memory is allocated, kernels are
    compiled. Of a short one half, and always the first, which follows the first evaluation."""
    return max(1, min(_WARMUP_STEPS, steps // 2))


def _no_seconds() -> dict[Cause, float]:
    return dict.fromkeys(CAUSES, 0.0)
