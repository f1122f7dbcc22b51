"""Readings of a GPU by NVML that is simulated, and of the host."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tokenfeed.trainer.report.machine import Gpu, Host


class NVMLError(Exception):
    """As pynvml has it."""


class Driver(SimpleNamespace):
    """NVML with one GPU, named by `uuid`; `samples` are those that it keeps."""

    NVMLError = NVMLError
    NVML_GPU_UTILIZATION_SAMPLES = 1

    def nvmlInit(self) -> None:
        if self.fails:
            raise NVMLError

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise NVMLError
        return uuid

    def nvmlDeviceGetMemoryInfo(self, gpu: str) -> Any:
        if self.fails:
            raise NVMLError
        return SimpleNamespace(used=3, total=8)

    def nvmlDeviceGetSamples(self, gpu: str, kind: int, since: int) -> tuple[int, list[Any]]:
        found = [
            SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=busy))
            for at, busy in self.samples
            if at > since
        ]
        if not found:
            raise NVMLError
        return 1, found

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> Any:
        if self.busy is None:
            raise NVMLError
        return SimpleNamespace(gpu=self.busy)


def driver(monkeypatch: pytest.MonkeyPatch, uuid: str = "GPU-a", **changes: Any) -> Driver:
    made = Driver(**{"uuid": uuid, "samples": [], "busy": 40, "fails": False} | changes)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def busy(gpu: Gpu | None) -> float | None:
    reading = gpu.read() if gpu else None
    assert reading
    return reading.gpu_busy


def test_load_is_the_mean_of_the_samples_since_the_reading_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time_ns() // 1000
    nvml = driver(monkeypatch, samples=[(now - 10**6, 100)])  # before the run
    gpu = Gpu.of_uuid("a")
    later = now + 10**6
    nvml.samples += [(later, 10), (later + 1, 30)]
    assert busy(gpu) == pytest.approx(0.2)
    nvml.samples += [(later + 2, 90)]
    assert busy(gpu) == pytest.approx(0.9)
    assert busy(gpu) == pytest.approx(0.4)  # no new sample: the latest moment


def test_load_without_samples_and_rates_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, uuid="MIG-a", busy=None)  # a part of a GPU
    gpu = Gpu.of_uuid("a")
    assert gpu
    reading = gpu.read()
    assert reading
    assert (reading.gpu_bytes, reading.gpu_total_bytes, reading.gpu_busy) == (3, 8, None)


def test_gpu_that_nvml_does_not_find_or_lose_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = driver(monkeypatch)
    assert Gpu.of_uuid("b") is None
    gpu = Gpu.of_uuid("a")
    assert gpu
    nvml.fails = True
    assert gpu.read() is None
    assert Gpu.of_uuid("a") is None
    assert [*Gpu.all()] == []


def test_host_is_read_in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setattr("psutil.cpu_percent", lambda percpu: [100.0, 20.0])
    found = host.read()
    assert (found["cpu_busy"], found["core_busy"]) == (0.6, 1.0)
    assert 0 < found["ram_used"] < 1
