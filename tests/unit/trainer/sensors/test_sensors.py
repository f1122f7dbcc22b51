"""Sensors against a driver that is played, and against what the system itself counts."""

import itertools
import sys
import time
from types import ModuleType
from typing import Any

import pytest
import torch
from support.commands import call

from tokenfeed.tools import train
from tokenfeed.tools.monitor import view
from tokenfeed.trainer.sensors import machine
from tokenfeed.trainer.sensors.machine import (
    GpuReading,
    GpuSensor,
    HostReading,
    MachineReader,
    gpus_here,
    read_host,
)


class NvmlError(Exception):
    pass


class Box:
    """Anything with attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Driver(ModuleType):
    """NVML with one GPU; functions in `refuses` raise, those in `lacks` are not there."""

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __init__(self, refuses: tuple[str, ...] = (), lacks: tuple[str, ...] = ()) -> None:
        super().__init__("pynvml")
        self._refuses, self._lacks = refuses, lacks

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("nvmlI", "nvmlD")) or name in self._lacks:
            raise AttributeError(name)

        def function(*arguments: Any) -> Any:
            if name in self._refuses:
                raise NvmlError(name)
            return ANSWERS.get(name)

        return function


ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetCount": 2,
    "nvmlDeviceGetName": "A GPU",
    "nvmlDeviceGetMemoryInfo": Box(used=3 << 30, total=8 << 30),
    "nvmlDeviceGetUtilizationRates": Box(gpu=75),
    "nvmlDeviceGetPowerUsage": 200_000,
    "nvmlDeviceGetEnforcedPowerLimit": 300_000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetClockInfo": 1500,
}


def read_gpu(monkeypatch: pytest.MonkeyPatch, **driver: Any) -> GpuReading:
    monkeypatch.setitem(sys.modules, "pynvml", Driver(**driver))
    return GpuSensor("handle").read()


def test_a_gpu_tells_what_its_driver_tells_in_our_units(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_gpu(monkeypatch) == GpuReading(
        name="A GPU",
        memory_bytes=3 << 30,
        memory_total_bytes=8 << 30,
        utilization=0.75,
        power_watts=200.0,
        power_limit_watts=300.0,
        celsius=61,
        clock_mhz=1500,
    )


FIELDS = {
    "nvmlDeviceGetMemoryInfo": "memory_bytes",
    "nvmlDeviceGetUtilizationRates": "utilization",
    "nvmlDeviceGetPowerUsage": "power_watts",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_watts",
    "nvmlDeviceGetTemperature": "celsius",
    "nvmlDeviceGetClockInfo": "clock_mhz",
}


@pytest.mark.parametrize("way", ["refuses", "lacks"])
@pytest.mark.parametrize("function", FIELDS)
def test_figure_that_driver_refuses_is_none(
    monkeypatch: pytest.MonkeyPatch, function: str, way: str
) -> None:
    found = read_gpu(monkeypatch, **{way: (function,)})
    assert [name for name in FIELDS.values() if getattr(found, name) is None] == [FIELDS[function]]


def test_all_gpus_are_found_and_without_a_driver_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver())
    assert [gpu.name for gpu in gpus_here()] == ["A GPU", "A GPU"]
    monkeypatch.setitem(sys.modules, "pynvml", Driver(refuses=("nvmlInit",)))
    assert gpus_here() == []


def test_host_reading_has_the_work_since_the_one_before() -> None:
    read_host()
    computed = time.process_time()
    while time.process_time() < computed + 0.3:
        sum(range(10_000))
    found = read_host()
    assert 0 < found.cores_busy <= found.cores
    assert 0 < found.memory_free_bytes < found.memory_total_bytes


def test_reader_keeps_its_reading_for_a_while_and_outlives_a_failed_sensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = [host_of(cores=number) for number in range(1, 3)]
    now = itertools.accumulate([0.0, 1.5, 1.0, 2.5, 100.0, 100.0])
    monkeypatch.setattr(machine, "time", Box(monotonic=lambda: next(now)))
    monkeypatch.setattr(machine, "read_host", lambda: readings.pop(0))
    reader = MachineReader(torch.device("cpu"))
    assert [reader.read() for _ in range(3)] == [(None, host_of(cores=n)) for n in (1, 1, 2)]
    assert [reader.read() for _ in range(2)] == [(None, None)] * 2  # no reading is left


def host_of(**changes: Any) -> HostReading:
    values = {
        "cores": 8,
        "cores_busy": 1.0,
        "memory_free_bytes": 50 << 30,
        "memory_total_bytes": 64 << 30,
    }
    return HostReading(**values | changes)


def gpu_of(**changes: Any) -> GpuReading:
    values = {"memory_bytes": 1 << 30, "memory_total_bytes": 8 << 30, "utilization": 0.99}
    return GpuReading(**values | changes)


def test_the_monitor_needs_neither_shards_nor_a_gpu_nor_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver(refuses=("nvmlInit",)))
    shown = call(train.main, "--monitor-only").stdout
    assert "NVML finds none" in shown
    assert "cores" in shown


def test_the_view_shows_what_is_known_and_leaves_out_what_is_not() -> None:
    full = gpu_of(name="H9", power_watts=250.0, power_limit_watts=500.0, clock_mhz=1980)
    shown = view([full, GpuReading()], host_of())
    for part in ("H9", " 99%", "250 W of 500 W", "1980 MHz", "1.0 of 8 cores"):
        assert part in shown
    assert "None" not in shown
