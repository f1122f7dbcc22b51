"""Watchers of events outside the marks: loader, collector, compiler, memory, waits for the GPU.

All watchers use public functions of Python and torch. A watcher whose function is missing does
nothing. Watchers of callbacks close when their meter is deleted.
"""

import gc
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from opcode import opname
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tokenfeed.trainer.stall.causes import Cause, Phase

if TYPE_CHECKING:
    from tokenfeed.trainer.stall.meter import StallMeter


_OLDEST_GENERATION = 2
"""Collections of younger generations take microseconds, and are frequent."""
_SECONDS_BETWEEN_POLLS = 0.005
"""Longer steps are polled one by one. Torch builds about 150 numbers at a poll, so polls of shorter
steps would take a noticeable share of the host's time."""


class _Interruptions:
    """Charges events that callbacks announce to a cause. Keeps a weak reference to its meter."""

    def __init__(self, meter: "StallMeter", cause: Cause) -> None:
        self._meter = weakref.ref(meter)
        self._cause: Cause = cause
        self._outer: Phase | None = None
        """What an open event has interrupted: perhaps another event, such as a compilation by a
        collection."""
        self.count = 0
        weakref.finalize(meter, self.close).atexit = False

    def close(self) -> None:
        """Stop watching."""

    def begin(self) -> bool:
        """An event begins. Return whether the meter could set a mark."""
        self.count += 1
        meter = self._meter()
        if meter is not None and self._outer is None:
            self._outer = meter.interrupt(self._cause)
        return self._outer is not None

    def end(self) -> None:
        """The event ends."""
        meter = self._meter()
        if meter is not None and self._outer is not None:
            meter.resume(self._outer)
            self._outer = None


class CollectorWatch(_Interruptions):
    """Charges full collections of Python's garbage collector."""

    def __init__(self, meter: "StallMeter") -> None:
        super().__init__(meter, "garbage collection")
        gc.callbacks.append(self._called)

    def close(self) -> None:
        """Stop watching."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            self.end()
        elif info["generation"] >= _OLDEST_GENERATION:
            self.begin()


class CompilerWatch(_Interruptions):
    """Charges compilations of torch.compile. Does not import torch.compile itself."""

    def __init__(self, meter: "StallMeter") -> None:
        super().__init__(meter, "recompilation")
        self._handler: Any = None
        self.is_blamed = False
        """Whether torch compiled where no mark can be set: in a thread of autograd."""

    def attach(self) -> None:
        """Start to watch, once the program has imported the compiler."""
        if self._handler is not None or "torch._dynamo" not in sys.modules:
            return
        try:
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)
            self._handler = callback_handler
        except (ImportError, AttributeError):
            self._handler = False

    def close(self) -> None:
        """Stop watching."""
        if self._handler:
            self._handler.remove_start_callback(self._start)
            self._handler.remove_end_callback(self._end)
        self._handler = False

    def _start(self, *_: object) -> None:
        self.is_blamed |= not self.begin()

    def _end(self, *_: object) -> None:
        self.end()


class AllocatorWatch:
    """Polls whether torch asked the driver for memory, which may wait for all work to end."""

    def __init__(self, read: Callable[[], dict[str, Any]] | None) -> None:
        """Args: `read` returns the statistics of torch's allocator. None: nothing to watch."""
        self._read = read
        self._last: tuple[int, ...] | None = None
        self._next_poll = 0.0
        self._count = self._retries = 0

    def counts(self) -> dict[str, int]:
        """Return how often memory was allocated, and how often memory was freed before."""
        return {"allocations": self._count, "allocation_retries": self._retries}

    def poll(self, now: float) -> bool:
        """Return whether memory was allocated or freed since the previous poll."""
        if self._read is None or now < self._next_poll:
            return False
        self._next_poll = now + _SECONDS_BETWEEN_POLLS
        stats = self._read()
        reserved = stats.get("reserved_bytes", {}).get("all", {})  # segments that grow count too
        found = (
            int(stats.get("num_device_alloc", 0)),
            int(stats.get("num_alloc_retries", 0)),
            int(reserved.get("allocated", 0)),
            int(reserved.get("freed", 0)),
        )
        before, self._last = self._last or found, found
        self._count += found[0] - before[0]
        self._retries += found[1] - before[1]
        return found != before


class CoreWait:
    """Share of the time in which a thread is ready to run but gets no core.

    Linux counts these nanoseconds for each thread, in /proc/PID/task/TID/schedstat.
    """

    def __init__(self) -> None:
        self._path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._began_s, self._waited_before_s = time.perf_counter(), self._waited_s()

    def share(self) -> float | None:
        """Return the share since this object was made, for the thread that made it; None if
        unknown."""
        before, now = self._waited_before_s, self._waited_s()
        seconds = time.perf_counter() - self._began_s
        if before is None or now is None or seconds <= 0:
            return None
        return min(1.0, max(0.0, (now - before) / seconds))

    def _waited_s(self) -> float | None:
        try:
            return int(self._path.read_text().split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):  # another system, or a thread that has ended
            return None


_MOST_SECONDS_OF_PROFILE = 30.0
MESSAGE = "called a synchronizing CUDA operation"


class WaitFinder:
    """Counts, by source line, the waits for the GPU that torch warns about.

    Torch keeps a warning until its function returns, so `on_wait` is called just after each wait.
    When the wait began is known from a profile function, which notes the time of each call.

    An examined step fails if an error ends a function that has called, at any depth, `begin`.
    All settings are then restored at once, and the step does not count.

    Args:
        on_wait: A method to call after each wait, with the host time of the last call before it;
            None if another profile function is set.
        now: Returns the host time.
    """

    def __init__(
        self,
        on_wait: weakref.WeakMethod[Callable[[float | None], None]] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._on_wait, self._now = on_wait or (lambda: None), now
        self._called: float | None = None
        """Host time of the latest call or return of a function."""
        self._lines: Counter[str] = Counter()
        self._left = 0
        self.steps = 0
        """Number of examined steps."""
        self._callers: set[int] = set()
        """Addresses of the frames that were running when the examination began."""
        self._caught: Any = None
        self._mode_before: Any = None
        self._can_look = False
        """Whether torch can warn of waits."""

    @property
    def is_looking(self) -> bool:
        """Whether the current step is examined."""
        return self._left > 0

    @property
    def found_none(self) -> bool:
        """Whether steps were examined by torch, and no line waited."""
        return self.steps > 0 and self._can_look and not self._lines

    @property
    def found_any(self) -> bool:
        """Whether a line waited."""
        return bool(self._lines)

    def begin(self, steps: int) -> None:
        """Examine this many steps from now on."""
        self._left = steps
        if self._caught is not None:
            return
        self._set_mode("warn")
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.filterwarnings("always", message=MESSAGE)  # even if warnings are errors
        self._show = warnings.showwarning
        warnings.showwarning = self._shown  # type: ignore[assignment]  # a method
        if sys.getprofile() is None:
            self._until = self._now() + _MOST_SECONDS_OF_PROFILE
            self._callers = set(_addresses_of(sys._getframe(1)))
            sys.setprofile(self._profiled)

    def end_step(self) -> None:
        """Count an examined step. After the last one, stop."""
        if not self._left:
            return
        self._left -= 1
        self.steps += self._caught is not None
        if not self._left:
            self.close()

    def found(self) -> dict[str, float]:
        """Return the waits per step by `file:line`, most frequent first."""
        steps = max(1, self.steps)  # none yet within the first examined step
        return {line: count / steps for line, count in self._lines.most_common()}

    def close(self) -> None:
        """Restore the settings of torch, of warnings and of Python."""
        self._left = 0
        if self._caught is None:
            return
        self._end_profile()
        self._caught.__exit__(None, None, None)
        self._caught = None
        self._set_mode(self._mode_before)

    def _shown(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        called = self._called  # before further calls
        if MESSAGE in str(message):
            self._lines[f"{filename}:{lineno}"] += 1
            if on_wait := self._on_wait():
                on_wait(called)
        else:
            self._show(message, category, filename, lineno, *rest)

    def _profiled(self, frame: FrameType, event: str, value: Any) -> None:
        """Note the time of a call or return, except while a warning is handled."""
        if event == "return" and id(frame) in self._callers:
            self._callers.remove(id(frame))  # another frame may get this address
            if value is None and _has_failed(frame):
                self.close()
                self._left = 1  # leave the rest of this step out of the measurement, too
                return
        if frame.f_globals is not globals() and frame.f_globals is not warnings.__dict__:
            self._called = self._now()
            if self._called > self._until:  # the loop has ended within an examined step
                self._end_profile()

    def _end_profile(self) -> None:
        self._called = None
        if sys.getprofile() == self._profiled:
            sys.setprofile(None)

    def _set_mode(self, mode: Any) -> None:
        cuda = sys.modules["torch"].cuda if "torch" in sys.modules else None
        if cuda is None or not cuda.is_initialized():
            return
        try:
            self._mode_before = cuda.get_sync_debug_mode()
            cuda.set_sync_debug_mode(mode)
            self._can_look = True
        except (AttributeError, RuntimeError):  # a build of torch without sync debug mode
            self._mode_before = None


def _addresses_of(frame: FrameType | None) -> Iterator[int]:
    """Yield the address of a frame and of all frames that have called it."""
    while frame is not None:
        yield id(frame)
        frame = frame.f_back


def _has_failed(frame: FrameType) -> bool:
    """Return whether an error ends a frame that seems to return nothing.

    A profile function sees a return in both cases. After an error, the frame is not at an
    instruction that returns or yields. From Python 3.13 on, a frame that yields is at the RESUME
    behind its YIELD_VALUE.
    """
    instruction = opname[frame.f_code.co_code[frame.f_lasti]]
    return not instruction.startswith(("RETURN", "YIELD", "RESUME"))


Batch = TypeVar("Batch")
watching: ContextVar["StallMeter | None"] = ContextVar("watching", default=None)
"""The meter that waits for a batch now. Loaders charge their waits for other ranks to it."""

_END: Any = object()


@dataclass(slots=True)
class LoaderUse:
    """How much of a loop's time a loader takes."""

    name: str
    """The name of its class."""
    num_workers: int | None
    """None if the loader has no such attribute."""
    batch_size: int | None
    """Items in a batch; None if the loader has no such attribute."""
    _count: int = 0
    _seconds: float = 0.0
    _began_s: float = 0.0
    _ended_s: float = 0.0

    @classmethod
    def of_loader(cls, loader: object) -> "LoaderUse":
        """Return the use of a loader that has not yielded a batch yet."""
        workers, rows = getattr(loader, "num_workers", None), getattr(loader, "batch_size", None)
        return cls(
            type(loader).__name__,
            workers if isinstance(workers, int) else None,
            rows if isinstance(rows, int) and rows > 0 else None,
        )

    @property
    def batch_seconds(self) -> float:
        """Mean seconds in `next` per batch. Leaves out the first batch, for which workers start."""
        return self._seconds / max(1, self._count - 1)

    @property
    def share(self) -> float:
        """Share of the time in `next`, from the first to the latest batch."""
        return self._seconds / max(1e-9, self._ended_s - self._began_s)

    def add(self, began_s: float, ended_s: float) -> None:
        """Add a batch, with the host time before and after `next`."""
        if self._count:
            self._seconds += ended_s - began_s
        else:
            self._began_s = ended_s
        self._count, self._ended_s = self._count + 1, ended_s


class WatchedLoader(Generic[Batch]):
    """A loader whose batches are timed. Every other attribute is that of the loader."""

    def __init__(self, meter: "StallMeter", batches: Iterable[Batch]) -> None:
        self._meter, self._batches = meter, batches
        self.use = LoaderUse.of_loader(batches)

    def __iter__(self) -> Iterator[Batch]:
        meter = self._meter
        outer = meter.enter("data")
        try:
            iterator = iter(self._batches)  # workers start here
        finally:
            meter.leave(outer)
        while True:
            outer, began_s = meter.enter("data"), time.perf_counter()
            before = watching.set(meter)
            try:
                batch = next(iterator, _END)
            finally:
                watching.reset(before)
                meter.leave(outer)
            if batch is _END:
                return
            self.use.add(began_s, time.perf_counter())
            yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # raises if the loader has no length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy under construction has no `_batches` yet
            raise AttributeError(name)
        return getattr(self.__dict__["_batches"], name)
