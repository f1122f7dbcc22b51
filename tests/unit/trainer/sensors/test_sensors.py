"""Sensors against a driver that is played, and against what the system itself counts."""

import contextlib
import sys
import threading
import time
from types import ModuleType
from typing import Any

import pytest
from support.commands import call
from support.processes import eventually

from tokenfeed.tools import train
from tokenfeed.tools.monitor import advise, view
from tokenfeed.trainer.sensors.gpu import GpuReading, GpuSensor, gpus_here
from tokenfeed.trainer.sensors.host import HostReading, HostSensor, MachineSampler


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
    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksEventReasonHwThermalSlowdown = 64

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
    "nvmlDeviceGetTotalEnergyConsumption": 5_000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetClockInfo": 1500,
    "nvmlDeviceGetCurrentClocksEventReasons": 4 | 64 | 1,
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
        joules=5.0,
        celsius=61,
        clock_mhz=1500,
        held_back_by=("power limit", "heat"),
    )


FIELDS = {
    "nvmlDeviceGetMemoryInfo": "memory_bytes",
    "nvmlDeviceGetUtilizationRates": "utilization",
    "nvmlDeviceGetPowerUsage": "power_watts",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_watts",
    "nvmlDeviceGetTotalEnergyConsumption": "joules",
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


def test_host_sensor_counts_what_this_process_computes() -> None:
    host = HostSensor()
    assert host.read().cores_busy is None
    started, computed = time.monotonic(), time.process_time()
    while time.process_time() < computed + 0.3:
        sum(range(10_000))
    second = host.read()
    seconds = time.monotonic() - started
    assert second.cores_busy is not None
    assert second.cores_busy * seconds == pytest.approx(time.process_time() - computed, abs=0.1)
    assert 1 << 20 < second.memory_bytes < second.memory_total_bytes
    assert 0 <= second.machine_cores_busy <= second.cores


def test_sampler_keeps_latest_reading_and_outlives_failed_sensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings, may_fail = [host_of(cores=number) for number in range(1, 6)], threading.Event()

    def read(_: HostSensor) -> HostReading:
        if not readings:
            may_fail.wait(30)
            raise OSError("the driver has gone")
        return readings.pop(0)

    monkeypatch.setattr(HostSensor, "read", read)
    with contextlib.closing(MachineSampler(None, every_s=0.001)) as sampler:
        assert eventually(lambda: sampler.host == host_of(cores=5))
        may_fail.set()
        assert eventually(lambda: sampler.host is None)
    assert not any(thread.name == "sampler" for thread in threading.enumerate())


def host_of(**changes: Any) -> HostReading:
    values = {
        "cores": 8,
        "machine_cores_busy": 1.0,
        "cores_busy": 1.0,
        "memory_bytes": 1 << 30,
        "memory_free_bytes": 50 << 30,
        "memory_total_bytes": 64 << 30,
    }
    return HostReading(**values | changes)


def gpu_of(**changes: Any) -> GpuReading:
    values = {"memory_bytes": 1 << 30, "memory_total_bytes": 8 << 30, "utilization": 0.99}
    return GpuReading(**values | changes)


@pytest.mark.parametrize(
    ("gpus", "host", "said"),
    [
        ([gpu_of()], {}, "Nothing to advise"),
        ([gpu_of(utilization=None)], {}, "Nothing to advise"),
        ([gpu_of(utilization=0.2)], {}, "GPU 0 is idle half of the time"),
        ([gpu_of(utilization=0.2)], {"machine_cores_busy": 8.0}, "it waits for the host"),
        ([gpu_of(), gpu_of(utilization=0.2)], {}, "GPU 1 is idle"),
        ([gpu_of(held_back_by=("heat",))], {}, "held back by heat"),
        ([gpu_of(memory_bytes=(8 << 30) - 1)], {}, "memory of GPU 0 is nearly full"),
        ([], {}, "Nothing to advise"),
        ([], {"machine_cores_busy": 8.0}, "All cores are busy"),
        ([gpu_of(utilization=0.2)], {"memory_free_bytes": 1 << 30}, "short of memory"),
    ],
)
def test_the_advice_names_what_costs_most(
    gpus: list[GpuReading], host: dict[str, Any], said: str
) -> None:
    assert said in advise(gpus, host_of(**host))


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
    for part in ("H9", " 99%", "250 W of 500 W", "1980 MHz", "1.0 of 8 cores", "Nothing to advise"):
        assert part in shown
    assert "None" not in shown
