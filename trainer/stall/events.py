"""The clock of a GPU: timing events on the current stream of that GPU."""

import time
from functools import partial
from typing import Any

import torch

from tokenfeed.pipeline.feeding.devices import accelerator

__all__ = ["EventClock"]

_CYCLES_PER_S = 1.5e9
"""About; a spin is measured like everything else, and asked for with a margin."""


class EventClock:
    """Events are kept in a pool and asked with `query`, never waited for.

    An elapsed time is a 32-bit float of milliseconds, exact to microseconds only when short: hence
    neighbours only.
    """

    method = (
        "GPU events, not yet compared with a trace of a GPU: between events around all that queues "
        "no work of the training, all time is idle; inside the work, idle time is what steps take "
        "longer than steps that the host had queued before they began"
    )
    is_beside_host = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        """Not always the current device of the thread: loops may use several."""
        self._accelerator = accelerator(device)
        self._module: Any = self._accelerator.module
        self._new_event = partial(self._module.Event, enable_timing=True)
        self._pool: list[torch.Event] = []

    def now(self) -> float:
        """Host time."""
        return time.perf_counter()

    def mark(self) -> tuple[torch.Event, float, float]:
        """Record an event on the device's current stream."""
        event = self._pool.pop() if self._pool else self._new_event()
        stream = self._accelerator.current_stream()
        before = time.perf_counter()
        event.record(stream)
        return event, before, time.perf_counter()

    def passed(self, mark: torch.Event) -> bool:
        """Whether the event has happened."""
        return bool(mark.query())

    def seconds(self, earlier: torch.Event, later: torch.Event) -> float:
        """GPU time between two events."""
        return float(earlier.elapsed_time(later)) / 1e3

    def recycle(self, mark: torch.Event) -> None:
        """Keep the event for a later mark."""
        self._pool.append(mark)

    def spin(self, seconds: float) -> bool:
        """A kernel that counts cycles; a private function of torch, which may lack it."""
        try:
            with self._module.device(self._device):
                self._module._sleep(int(seconds * _CYCLES_PER_S))
        except (AttributeError, RuntimeError):  # a build of torch without it
            return False
        return True

    def takes_marks(self) -> bool:
        """Not while a CUDA graph is captured: an event would become a part of it."""
        try:
            with self._module.device(self._device):
                return not self._module.is_current_stream_capturing()
        except (AttributeError, RuntimeError):  # see above: none is captured
            return True
