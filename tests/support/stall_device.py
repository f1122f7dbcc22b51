"""A device beside its host, simulated: what it idles is known, and by what.

Kernels of a stream run one after the other, each when it has been queued, its launch has come
through, and what it waits for is done. A stream holds so many kernels; a host that queues one more
waits. The device's clock runs at its own speed from its own beginning, and tells differences as
CUDA does, in 32-bit milliseconds. It is a `Clock` of the stall meter, with a tracer. Several
devices may share a host; `CudaOfDevices` offers them as torch.cuda does.
"""

import contextlib
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tokenfeed.trainer.stall.marks import Clock, EventClock
from tokenfeed.trainer.stall.traces import Trace

COMPUTE = "compute"


@dataclass(slots=True)
class Stream:
    """A queue of kernels, by the times at which they end."""

    ends: deque[float]
    free: float = 0.0
    waits_until: float = 0.0


@dataclass(slots=True)
class Host:
    """The thread that queues the work of one or several devices."""

    now: float = 7.0


class SimulatedDevice(Clock):
    """Seconds of one true clock; `host` is where the host is.

    Args:
        seed: Of the noise.
        launch: Host seconds to queue a kernel.
        latency: From queue to device.
        depth: Kernels that a stream holds.
        noise: Of kernels and launches, as a share.
        drift: Of the device's clock.
        meter_seconds: Host seconds of the meter's Python around each mark.
        on: The host; None for one of its own.
        traced: Whether there is a tracer.
    """

    method = "simulated"
    is_beside_host = True

    def __init__(
        self,
        seed: int = 0,
        *,
        launch: float = 8e-6,
        latency: float = 4e-6,
        depth: int = 1024,
        noise: float = 0.2,
        drift: float = 2e-5,
        meter_seconds: float = 0.0,
        on: Host | None = None,
        traced: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.launch_seconds, self.latency, self.depth = launch, latency, depth
        self.noise, self.drift, self.meter_seconds = noise, drift, meter_seconds
        self.clock = on or Host()
        self.idle = 0.0
        self._compute = Stream(deque(maxlen=depth), free=self.host)
        self._streams = {COMPUTE: self._compute}
        self.records: Records | None = None
        """What a tracer records now."""
        self.own_tracer = SimulatedTracer(self) if traced else None

    @property
    def host(self) -> float:
        return self.clock.now

    @host.setter
    def host(self, now: float) -> None:
        self.clock.now = now

    def launch(self, seconds: float, stream: str = COMPUTE) -> float:
        """Queue a kernel, and say when it ends."""
        self.host += self.launch_seconds * self._factor()
        return self._queue(self._stream(stream), seconds * self._factor())

    def work(self, kernels: int, seconds: float) -> None:
        """Queue so many kernels on the stream that computes."""
        draw, noise, latency, depth = self.random.random, self.noise, self.latency, self.depth
        stream, launch = self._compute, self.launch_seconds
        ends, free, least = stream.ends, stream.free, stream.waits_until
        now, idle = self.clock.now, self.idle
        kernel_rows = [] if self.records is None else self.records.kernels
        for _ in range(kernels):  # as `launch`, in a quarter of the time: tests queue millions
            now += launch * (1 + noise * (2 * draw() - 1))
            if len(ends) == depth and ends[0] > now:
                now = ends[0]
            start = now + latency
            if start < least:
                start = least
            if start > free:
                idle += start - free
                free = start
            began = free
            free += seconds * (1 + noise * (2 * draw() - 1))
            ends.append(free)
            if self.records is not None:
                kernel_rows.append((began, free))
        self.clock.now, stream.free, self.idle = now, free, idle

    def compute_waits(self, moment: float) -> None:
        """What is queued from here on runs after that moment: an event of another stream."""
        self._compute.waits_until = max(self._compute.waits_until, moment)

    def wait(self) -> None:
        """The host waits until all is done."""
        began = self.host
        self.host = max(self.host, self._compute.free) + self.latency
        if self.records is not None:
            self.records.waits.append((began, self.host))

    @property
    def done(self) -> float:
        """When all that is queued will be done."""
        return self._compute.free

    def now(self) -> float:
        return self.host

    def mark(self) -> float:
        self.host += self.meter_seconds / 2 + 1e-6
        moment = self._queue(self._compute, 0.0)
        self.host += self.meter_seconds / 2 + 1e-6
        return moment

    def passed(self, mark: float) -> bool:
        return mark <= self.host

    def seconds(self, earlier: float, later: float) -> float:
        return float(np.float32((later - earlier) * (1 + self.drift) * 1e3)) / 1e3

    def tracer(self) -> "SimulatedTracer | None":
        return self.own_tracer

    def _queue(self, stream: Stream, seconds: float) -> float:
        ends, free, host = stream.ends, stream.free, self.clock
        if len(ends) == self.depth and ends[0] > host.now:
            host.now = ends[0]
        start = max(free, host.now + self.latency, stream.waits_until)
        if stream is self._compute:
            self.idle += start - free
        stream.free = end = start + seconds
        if seconds:
            ends.append(end)
            if self.records is not None:
                is_kernel = stream is self._compute
                (self.records.kernels if is_kernel else self.records.copies).append((start, end))
        return end

    def _stream(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = Stream(deque(maxlen=self.depth))
        return self._streams[name]

    def _factor(self) -> float:
        return 1 + self.noise * (2 * self.random.random() - 1)


@dataclass(slots=True)
class Records:
    """What a tracer has recorded, by the true clock."""

    kernels: list[tuple[float, float]] = field(default_factory=list)
    copies: list[tuple[float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    borders: list[tuple[float, float]] = field(default_factory=list)


class SimulatedTracer:
    """A tracer that drains the queue at both ends, loses the first kernels, and has a clock of its
    own."""

    least_seconds, usual_seconds = 0.5, 2.0

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.traces = 0
        self.lost_share = 0.0
        """Share of kernels without a record."""
        self.lost_borders: set[int] = set()
        self.stretch = 1.0
        """Speed of the tracer's clock."""
        self.why: str | None = None
        self.error: Exception | None = None

    def why_not(self) -> str | None:
        return self.why

    def start(self) -> None:
        if self.error is not None:
            raise self.error
        self._device.wait()
        self._device.host += 0.03
        self._device.records = Records()
        self.traces += 1

    def border(self) -> None:
        device, records = self._device, self._device.records
        assert records is not None
        device.records = None
        device.host += device.launch_seconds
        end = device._queue(device._compute, 1e-6)
        records.borders.append((end - 1e-6, end))
        device.records = records

    def stop(self) -> Trace:
        device, records = self._device, self._device.records
        assert records is not None
        device.records = None
        device.wait()
        device.host += 0.01
        kernels, borders = np.array(records.kernels).reshape(-1, 2), np.array(records.borders)
        is_lost = np.random.default_rng(self.traces).random(len(kernels)) < self.lost_share
        lost = np.searchsorted(borders[:, 0], kernels[is_lost, 0], side="right") - 1
        borders[list(self.lost_borders)] = np.nan
        origin = 1e3 * self.traces
        return Trace(
            borders=(borders + origin) * self.stretch,
            kernels=(kernels[~is_lost] + origin) * self.stretch,
            lost=lost[(lost >= 0) & (lost < len(borders) - 1)],
            pause=0.0,
            copies=np.array(records.copies).reshape(-1, 2) + origin,
            waits=np.array(records.waits).reshape(-1, 2) + origin,
        )


class CudaOfDevices:
    """Devices of one host behind the names of torch.cuda, as far as a meter uses them.

    As in torch, an event is recorded on the stream it is given, else on that of the current device,
    and a device gets a context by being used.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: list[SimulatedDevice]) -> None:
        self.devices = devices
        self.current = 0
        self.contexts: set[int] = set()
        self.capturing: int | None = None
        """The device on whose stream a graph is captured."""
        for name in ("device", "current_stream", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "simulated")
        properties = SimpleNamespace(uuid="simulated")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})
        monkeypatch.setattr("time.perf_counter", devices[0].now)
        monkeypatch.setattr(
            EventClock, "tracer", lambda clock: devices[clock._device.index].own_tracer
        )

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def current_stream(self, device: torch.device | None = None) -> int:
        """A stream is known by its device."""
        return self._use(self.current if device is None else device.index)

    def is_current_stream_capturing(self) -> bool:
        return self._use(self.current) == self.capturing

    def _event(self, *, enable_timing: bool) -> "_Event":
        assert enable_timing
        return _Event(self)

    def _use(self, index: int) -> int:
        self.contexts.add(index)
        return index


class _Event:
    def __init__(self, cuda: CudaOfDevices) -> None:
        self._cuda = cuda
        self._device: SimulatedDevice
        self.moment = 0.0

    def record(self, stream: int | None = None) -> None:
        index = self._cuda.current_stream() if stream is None else stream
        self._device = self._cuda.devices[index]
        self.moment = self._device.mark()

    def query(self) -> bool:
        return self._device.passed(self.moment)

    def elapsed_time(self, later: "_Event") -> float:
        return self._device.seconds(self.moment, later.moment) * 1e3
