"""`train --monitor-only`, with a driver that is simulated."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.commands import call

from tokenfeed.tools import train


class NvmlError(Exception):
    pass


def fail(*arguments: object) -> None:
    raise NvmlError


def driver(count: int) -> SimpleNamespace:
    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetName=lambda gpu: f"H{gpu}",
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=3e9, total=8e9),
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=75),
        nvmlDeviceGetSamples=fail,
        nvmlDeviceGetComputeRunningProcesses=fail,
        NVML_GPU_UTILIZATION_SAMPLES=1,
        nvmlDeviceGetPowerUsage=lambda gpu: 200_000,
    )


def test_monitor_shows_gpus_and_host_without_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(2))
    shown = call(train.main, "--monitor-only").stdout
    assert "H1, 75 % busy, 3.0 of 8.0 GB (38 %), 200 W" in shown
    assert "cores busy" in shown
    monkeypatch.setitem(sys.modules, "pynvml", driver(0))
    assert "NVML finds none" in call(train.main, "--monitor-only").stdout


def test_monitor_names_a_run_without_a_report(tmp_path: Path) -> None:
    shown = call(train.main, "--monitor-only", "--run-dir", tmp_path).stdout
    assert f"{tmp_path} has no report yet" in shown
    refused = call(train.main, "--monitor-only", "--rundir", tmp_path, expect=2).stderr
    assert "Did you mean --run-dir?" in refused


def test_monitor_rejects_settings_of_a_run() -> None:
    refused = call(train.main, "--monitor-only", "--steps", 3, expect=2).stderr
    assert "`--steps`: --monitor-only takes only --run-dir" in refused
