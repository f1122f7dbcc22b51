"""Traces of a GPU's kernels by torch.profiler, which records them with Kineto and CUPTI.

Reading a trace takes microseconds for each event, so only the records of Kineto are read, never
`events()` or `key_averages()` of the profiler. What CUPTI does to a program, and what is done about
it:

- It stays attached after the first trace, and may slow down each launch for ever. `TEARDOWN_CUPTI`
  is set to 1 during a trace, unless it is set already, from CUDA 12.6 on.
- Detaching crashes programs with CUDA graphs. So they are not traced, unless the user has set
  `TEARDOWN_CUPTI`.
- It drops the first kernels of a trace. A burst of small kernels precedes the first border.
"""

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenfeed.trainer.stall.traces import Trace

if TYPE_CHECKING:
    import torch

_BORDER = "spin_kernel"
"""The kernel of `torch.cuda._sleep`. Training programs do not use it."""
_BURST = 200
"""Number of small kernels in a row that show the pause of the device between two kernels."""
_CYCLES_BEFORE_BURST = 6_000_000
"""Cycles of a kernel before them. It runs for about 4 ms, in which the host queues the others."""
_CYCLES = 1
"""Cycles of a border, and of a small kernel."""
_TEARDOWN = "TEARDOWN_CUPTI"
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"
"""The level at which Kineto prints nothing."""
_WAITS = ("Synchronize", "cudaMemcpy", "cudaFree", "cudaMalloc")
"""Parts of the names of calls that wait for the device, unless `_COPY_AHEAD` is in them too."""
_COPY_AHEAD = "Async"


class KinetoTracer:
    """Traces the kernels of a GPU.

    Args:
        device: The GPU.
    """

    least_seconds = 12.0
    """Two sessions of CUPTI in quick succession race, so at least 5 s are between traces. The
    distance is at least 0.7 times this, and each trace moves by up to a fifth of the distance."""
    usual_seconds = 20.0

    def __init__(self, device: "torch.device") -> None:
        from tokenfeed.pipeline.feeding.devices import cuda

        self._device, self._cuda = device, cuda
        self._profiler: Any = None
        self._environment = contextlib.ExitStack()
        self._borders = 0
        self._burst: tuple[Any, Any] | None = None

    def why_not(self) -> str | None:
        """Return why no trace can be taken now; None if one can."""
        import torch

        if not hasattr(self._cuda, "_sleep"):
            return "this build of torch has no torch.cuda._sleep"
        if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():  # type: ignore[no-untyped-call]
            return "this build of torch cannot trace a GPU"
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return "a profiler of the program is on"
        alive = set(map(type, gc.get_objects()))  # 0.02 s for a million objects
        for kind, reason in (
            (torch.profiler.profile, "the program has a profiler of its own"),
            (torch.cuda.CUDAGraph, f"the program uses CUDA graphs (set {_TEARDOWN}=0 to trace it)"),
        ):
            if kind is torch.cuda.CUDAGraph and os.environ.get(_TEARDOWN):
                continue
            if any(issubclass(each, kind) for each in alive):
                return reason
        with self._cuda.device(self._device):
            is_capturing = self._cuda.is_current_stream_capturing()
        return "a CUDA graph is being captured" if is_capturing else None

    def start(self) -> None:
        """Start to record."""
        from torch.profiler import ProfilerActivity, profile

        self._borders = 0
        self._burst = self._queue_burst()
        self._environment.enter_context(quiet())
        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        try:
            self._profiler.start()
        except BaseException:
            self._environment.close()
            raise
        for _ in range(_BURST):
            self._sleep(_CYCLES)

    def border(self) -> None:
        """Queue a tiny kernel with a name of its own."""
        self._sleep(_CYCLES)
        self._borders += 1

    def stop(self) -> Trace:
        """Wait for the device, stop to record, and read the records."""
        profiler, self._profiler = self._profiler, None
        with self._environment:
            profiler.stop()
        results = profiler.profiler.kineto_results
        trace, small = trace_of(results.events(), self._device.index or 0, self._borders)
        trace.pause = self._pause(small)
        return trace

    def _queue_burst(self) -> "tuple[Any, Any]":
        """Queue small kernels behind a long one, between two events."""
        events = [self._cuda.Event(enable_timing=True) for _ in range(2)]
        stream = self._cuda.current_stream(self._device)
        self._sleep(_CYCLES_BEFORE_BURST)
        events[0].record(stream)
        for _ in range(_BURST):
            self._sleep(_CYCLES)
        events[1].record(stream)
        return events[0], events[1]

    def _pause(self, small: float | None) -> float | None:
        """Return the device's pause between two kernels: their distance without a trace, minus
        their mean seconds in the trace. So what the trace adds to a kernel cancels out."""
        if small is None or self._burst is None:
            return None
        first, last = self._burst
        return max(0.0, float(first.elapsed_time(last)) / 1e3 / _BURST - small)

    def _sleep(self, cycles: int) -> None:
        with self._cuda.device(self._device):
            self._cuda._sleep(cycles)


def trace_of(events: Sequence[Any], device: int, borders: int) -> tuple[Trace, float | None]:
    """Return a trace, and the mean seconds of its first border kernels, which are the burst.

    Args:
        events: Records of Kineto. Their names are those of CUPTI and of the CUDA runtime.
        device: Index of the GPU.
        borders: Number of borders that were queued, at the end of the trace.
    """
    kernels, copies, calls = list[Any](), list[Any](), list[Any]()
    for event in events:
        kind = event.activity_type()
        if kind == "kernel":
            kernels.append(event)
        elif kind in ("gpu_memcpy", "gpu_memset"):
            copies.append(event)
        elif kind in ("cuda_runtime", "cuda_driver"):
            calls.append(event)
    recorded = {event.correlation_id() for event in (*kernels, *copies)}
    ours = [event for event in kernels if event.start_ns() > 0 and event.device_index() == device]
    names = [event.name() for event in ours]
    spins = sorted(
        (event for event, name in zip(ours, names, strict=True) if _BORDER in name),
        key=lambda event: event.start_ns(),
    )
    ends = spins[-borders:] if borders else []
    small = [event.duration_ns() for event in spins[: len(spins) - len(ends)]]
    first = min((event.start_ns() for event in ours), default=0)

    def rows(found: Sequence[Any]) -> Any:
        """Return starts and ends in seconds since the first kernel, by start."""
        table = np.array([(each.start_ns(), each.duration_ns()) for each in found], np.int64)
        table = table.reshape(-1, 2) - (first, 0)
        table = table[np.argsort(table[:, 0], kind="stable")]
        return np.stack([table[:, 0], table.sum(1)], axis=1) / 1e9

    stream = ends[-1].device_resource_id() if ends else None
    own = [
        event
        for event, name in zip(ours, names, strict=True)
        if _BORDER not in name and not _is_exchange(name)
    ]
    exchanges = [event for event, name in zip(ours, names, strict=True) if _is_exchange(name)]
    here = [event for event in copies if event.start_ns() > 0 and event.device_index() == device]
    own += [event for event in here if event.device_resource_id() == stream]
    names_of_calls = [event.name() for event in calls]
    queued = {event.correlation_id(): event.start_ns() for event in calls}
    moments = sorted(queued.get(event.correlation_id(), 0) for event in ends)
    lost = [
        event.start_ns()
        for event, name in zip(calls, names_of_calls, strict=True)
        if "Launch" in name and event.correlation_id() not in recorded
    ]
    missing = borders - len(ends)
    segments = np.searchsorted(moments, lost, side="right") + missing - 1
    last = borders - 2
    table = np.concatenate([np.full((missing, 2), np.nan), rows(ends)])
    return Trace(
        borders=table,
        kernels=rows(own),
        lost=segments[(segments >= max(0, missing)) & (segments <= last)],
        copies=rows([event for event in here if event.device_resource_id() != stream]),
        exchanges=rows(exchanges),
        waits=rows(
            [event for event, name in zip(calls, names_of_calls, strict=True) if is_wait(name)]
        ),
        has_graphs=any("GraphLaunch" in name for name in names_of_calls),
    ), (sum(small) / len(small) / 1e9 if len(small) >= _BURST // 4 else None)


def is_wait(name: str) -> bool:
    """Return whether a call of the CUDA runtime makes the host wait for the device."""
    return any(part in name for part in _WAITS) and _COPY_AHEAD not in name


def _is_exchange(name: str) -> bool:
    return name.startswith(("nccl", "rccl"))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Set the environment of a trace for the time of a block: detach CUPTI, and print nothing.
    Variables that the user has set keep their values."""
    import torch

    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    settings = {_LOG_LEVEL: _SILENT} | ({_TEARDOWN: "1"} if version >= (12, 6) else {})
    ours = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
