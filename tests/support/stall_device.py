"""The simulated devices of `benchmarks/stall` under the names of torch.cuda."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from benchmarks.stall.device import Device
from tokenfeed.trainer.stall.marks import EventClock


class CudaOfDevices:
    """Devices behind the names of torch.cuda, as far as a meter uses them.

    As in torch, an event is recorded on the stream it is given, else on that of the current device,
    and a device gets a context by being used. The last device has the host's clock.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: list[Device]) -> None:
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
        monkeypatch.setattr("time.perf_counter", devices[-1].now)
        monkeypatch.setattr(
            EventClock, "tracer", lambda clock: devices[clock._device.index].tracer()
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
        self._device: Device
        self.moment = 0.0

    def record(self, stream: int | None = None) -> None:
        index = self._cuda.current_stream() if stream is None else stream
        self._device = self._cuda.devices[index]
        self.moment = self._device.mark()

    def query(self) -> bool:
        return self._device.passed(self.moment)

    def elapsed_time(self, later: "_Event") -> float:
        return self._device.seconds(self.moment, later.moment) * 1e3
