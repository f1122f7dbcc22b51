"""Watchers of events outside the marks: loader, collector, compiler, memory and cores.

All watchers use public functions of Python and torch. A watcher whose function is missing does
nothing. Watchers of callbacks close when their meter is deleted.
"""

import gc
import itertools
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from tokenfeed.pipeline.feeding.placement import usable_cores
from tokenfeed.pipeline.text import count_of
from tokenfeed.trainer.stall.causes import Cause
from tokenfeed.trainer.stall.marks import Phase

if TYPE_CHECKING:
    from tokenfeed.trainer.stall.meter import StallMeter


_OLDEST_GENERATION = 2
"""The generation of full collections. Others are frequent, and take microseconds."""
_SECONDS_BETWEEN_POLLS = 0.005
"""Least seconds between two polls of the allocator. Torch collects about 150 numbers for each."""


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
            meter.leave(self._outer)
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

    def collect(self, generation: int) -> None:
        """Collect garbage without callbacks: Python would drop an interruption that is raised in
        one of them."""
        callbacks, gc.callbacks[:] = [*gc.callbacks], []
        try:
            self._called("start", {"generation": generation})
            gc.collect(generation)
        finally:
            gc.callbacks[:] = callbacks
            self.end()

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

    def __init__(self, read: Callable[[], dict[str, Any] | None]) -> None:
        """Args: `read` returns the statistics of torch's allocator; None without one."""
        self._read, self.is_on = read, read() is not None
        self._last: tuple[int, ...] | None = None
        self._next_poll = 0.0
        self._count = self._retries = 0

    def counts(self) -> dict[str, int]:
        """Return how often memory was allocated, and how often memory was freed before."""
        return {"allocations": self._count, "allocation_retries": self._retries}

    def poll(self, now: float) -> bool:
        """Return whether memory was freed since the previous poll, which stops the device."""
        if not self.is_on or now < self._next_poll:
            return False
        self._next_poll = now + _SECONDS_BETWEEN_POLLS
        stats = self._read() or {}
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
        return found[1] != before[1] or found[3] != before[3]


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


FETCHES = 8
"""Calls of `next` per call whose computing is timed, which takes microseconds."""
_SPARE = 1.1
"""Workers that are advised, divided by the workers that would just keep up."""
Batch = TypeVar("Batch")
watching: ContextVar["StallMeter | None"] = ContextVar("watching", default=None)
"""The meter that waits for a batch now. Loaders charge their waits for other ranks to it."""

_END: Any = object()


class Loader(NamedTuple):
    """The loader of the training batches."""

    name: str
    """The name of its class."""
    num_workers: int | None
    """None if the loader has no such attribute."""
    place: str = ""
    """Where it was made, if that is known: `train.py:20`."""
    setting: str = ""
    """The setting of its trainer, such as "`dataloader_num_workers` of `TrainingArguments`"."""
    prefetch: int | None = None
    """Batches that a ShardLoader copies to a GPU ahead of the loop; None for another loader."""
    is_ours: bool = False
    """Whether it reads shards, so no code of the user makes its rows."""
    busy: float | None = None
    """Share of the time of `next` in which the training thread computed; None if workers make the
    batches, or if it is unknown."""

    @classmethod
    def of(cls, loader: object, place: str = "", setting: str = "") -> "Loader":
        """Describe a loader, or the one that an iterator, such as a generator, reads from."""
        inner = _loader_in(loader)
        loader = loader if inner is None else inner
        number, rows = _workers_of(loader), getattr(loader, "dataset", None)
        is_ours = any(type(each).__module__.startswith(_OURS) for each in (loader, rows))
        prefetch = getattr(loader, "prefetch", None) if is_ours else None
        # Iterators of a DataLoader do not refer to it.
        is_iterator = hasattr(loader, "_num_workers") and not hasattr(loader, "num_workers")
        name = "DataLoader" if is_iterator else type(loader).__name__
        return cls(name, number, place, setting, prefetch or None, is_ours)

    def remedy(self, waiting: float) -> str:
        """Return advice on the number of workers.

        Args:
            waiting: Share of the time in which the loop waits for batches.

        Example: without workers, a loop waits for batches for 91 % of its time. Each batch then
        trains for the other 9 %, so 91 / 9 = 10.1 workers would just keep up, and 12 are advised.
        If items compute, only as many workers as there are cores help.
        """
        workers, cores = self.num_workers or 0, usable_cores()
        needed = math.ceil(_SPARE * (workers or waiting) / max(1e-9, 1 - waiting) - 1e-9)
        needed = max(workers + 1, needed)
        is_bound = self.is_ours or (self.busy is not None and self.busy >= _BUSY)
        number = max(1, min(needed, cores)) if is_bound else needed
        text = f"set `num_workers={number}` in your {self.name}"
        text = f"set {self.setting} to {number}" if self.setting else text
        where = f" ({self.place})" * bool(self.place)
        if needed <= cores:
            return text + where
        if is_bound:
            raised = [text + where] * (number > workers)
            if self.is_ours:
                deeper = f"raise its `prefetch` from {self.prefetch} to {2 * (self.prefetch or 0)}"
                raised += [deeper] * bool(self.prefetch)
                more = f"give your {self.name} more cores"
            else:
                more = f"make items cheaper{where * (not raised)}"
            others = f": {needed} workers would keep up, and there are {count_of(cores, 'core')}"
            return ", and ".join([*raised, more]) + others
        if self.busy is None:
            why = "if its items wait more than they compute; else make items cheaper"
        else:
            why = "since its items wait more than they compute"
        return f"{text}{where}, more than the {count_of(cores, 'core')}, {why}"


_OURS = ("tokenfeed.", "src.tokenfeed.")
_BUSY = 0.5
"""If items compute for this share of their time, more workers than cores do not help."""
_MOST_VISITED, _DEEPEST = 200, 5
_LEAVES = (str, bytes, list, dict, tuple, set, type, ModuleType, FunctionType)
"""Objects that no loader is looked for in."""


def _workers_of(loader: object) -> int | None:
    """Return the number of workers of a loader, or of an iterator of a DataLoader; else None."""
    try:
        number = getattr(loader, "num_workers", getattr(loader, "_num_workers", None))
    except Exception:  # a property of somebody else
        return None
    return number if isinstance(number, int) else None


def _loader_in(found: object) -> object | None:
    """Return the loader that an iterator reads from: an object with a number of workers."""
    level, visited = [found], set[int]()
    for _ in range(_DEEPEST):
        for each in level:
            if _workers_of(each) is not None and hasattr(each, "__iter__"):
                return each
        visited.update(map(id, level))
        below = gc.get_referents(*level)[:_MOST_VISITED]
        level = [each for each in below if id(each) not in visited and _is_iterable(each)]
    return None


def _is_iterable(found: object) -> bool:
    """Return whether an object, or the owner of a method, may read from a loader."""
    owner = getattr(found, "__self__", found) if isinstance(found, MethodType) else found
    return hasattr(owner, "__iter__") and not isinstance(owner, _LEAVES)


class WatchedLoader(Generic[Batch]):
    """A loader whose batches are timed. Every other attribute is that of the loader."""

    def __init__(self, meter: "StallMeter", batches: Iterable[Batch]) -> None:
        self._meter, self._batches = meter, batches

    def __iter__(self) -> Iterator[Batch]:
        meter = self._meter
        outer = meter.enter("data")
        try:
            iterator = iter(self._batches)  # workers start here
        finally:
            meter.leave(outer)
        for number in itertools.count():
            outer, before = meter.enter("data"), watching.set(meter)
            is_timed = number % FETCHES == 1
            began, computed = (time.perf_counter(), time.thread_time()) if is_timed else (0.0, 0.0)
            try:
                batch = next(iterator, _END)
            finally:
                if is_timed:
                    meter.fetched(time.perf_counter() - began, time.thread_time() - computed)
                watching.reset(before)
                meter.leave(outer)
            if batch is _END:
                return
            if number == 0:  # a generator has found its loader by now
                meter.reads_from(iterator)
            yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # raises if the loader has no length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy under construction has no `_batches` yet
            raise AttributeError(name)
        return getattr(self.__dict__["_batches"], name)
