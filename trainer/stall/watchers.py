"""What happens to a step unasked: Python's collector, torch's compiler, the memory of a GPU.

All are asked through what Python and torch offer for it; what one of them lacks is not watched.
They know their meter weakly, and take themselves off when it is gone.
"""

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

__all__ = ["AllocatorWatch", "CollectorWatch", "CompilerWatch", "CoreWait", "Interrupted"]

_OLDEST_GENERATION = 2
"""Others take microseconds, and come often."""
_SECONDS_BETWEEN_POLLS = 0.05


class Interrupted(Protocol):
    """What is told of interruptions."""

    def interrupt(self, cause: Any) -> bool:
        """The program has stopped working; False where no mark can tell when."""
        ...

    def resume(self) -> None:
        """It goes on."""
        ...


class CollectorWatch:
    """Tells of full collections of Python's garbage."""

    def __init__(self, meter: Interrupted) -> None:
        self._meter = weakref.ref(meter)
        self._is_open = False
        self.count = 0
        gc.callbacks.append(self._called)
        weakref.finalize(meter, self.close).atexit = False

    def close(self) -> None:
        """Stop watching."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        meter = self._meter()
        if meter is None:
            return
        if phase == "stop" and self._is_open:
            self._is_open = False
            meter.resume()
        elif phase == "start" and info["generation"] >= _OLDEST_GENERATION:
            self.count += 1
            self._is_open = meter.interrupt("garbage collection")


class CompilerWatch:
    """Tells when torch.compile compiles; it is not imported for that."""

    def __init__(self, meter: Interrupted) -> None:
        self._meter = weakref.ref(meter)
        self._handler: Any = None
        self._is_open = False
        self.count = 0
        weakref.finalize(meter, self.close).atexit = False
        self.is_blamed = False
        """Whether it compiled where no mark could tell: in a thread of autograd."""

    def attach(self) -> None:
        """Begin to watch, once the program has imported the compiler."""
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
        meter = self._meter()
        self.count += 1
        if meter is not None and not self._is_open:
            self._is_open = meter.interrupt("recompilation")
            self.is_blamed |= not self._is_open

    def _end(self, *_: object) -> None:
        meter = self._meter()
        if meter is not None and self._is_open:
            self._is_open = False
            meter.resume()


class AllocatorWatch:
    """Knows when torch asked the driver for memory, which may wait for all work to end."""

    def __init__(self, read: Callable[[], dict[str, Any]] | None) -> None:
        """Args: `read` gives the statistics of torch's allocator; None where there are none."""
        self._read = read
        self._last: tuple[int, int] | None = None
        self._next_poll = 0.0
        self._count = self._retries = 0

    def counts(self) -> dict[str, int]:
        """How often memory was asked for, and had to be given back before."""
        return {"allocations": self._count, "allocation_retries": self._retries}

    def poll(self, now: float) -> bool:
        """Whether it did since the poll before."""
        if self._read is None or now < self._next_poll:
            return False
        self._next_poll = now + _SECONDS_BETWEEN_POLLS
        try:
            stats = self._read()
        except Exception:  # a part of torch that builds and devices may lack: never a run's end
            self._read = None
            return False
        seen = int(stats.get("num_device_alloc", 0)), int(stats.get("num_alloc_retries", 0))
        before, self._last = self._last or seen, seen
        self._count += seen[0] - before[0]
        self._retries += seen[1] - before[1]
        return seen != before


class CoreWait:
    """Share of the time in which a thread is ready to run and gets no core.

    Linux counts these nanoseconds for each thread, in /proc/PID/task/TID/schedstat.
    """

    def __init__(self) -> None:
        self._path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._began_s, self._waited_before_s = time.perf_counter(), self._waited_s()

    def share(self) -> float | None:
        """The share since this was made, for the thread that made it; None if it is not known."""
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
