"""Readings of a GPU whose driver is simulated."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from tokenfeed.trainer.sensors import gpu
from tokenfeed.trainer.sensors.gpu import GpuReader, GpuReading

FIGURES = {"device_memory_used": 3 << 30, "utilization": 75, "power_draw": 200_000}
READING = {"memory_bytes": 3 << 30, "utilization": 0.75, "power_watts": 200.0}


def refuse(device: torch.device) -> int:
    raise RuntimeError("the driver has failed")


@pytest.mark.parametrize("refused", [None, *FIGURES])
def test_reading_has_units_and_none_for_what_the_driver_refuses(
    refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, figure in FIGURES.items():
        monkeypatch.setattr(torch.cuda, name, refuse if name == refused else lambda _, n=figure: n)
    missing = {field: None for field, name in zip(READING, FIGURES, strict=True) if name == refused}
    assert GpuReader(torch.device("cuda")).read() == GpuReading(**READING | missing)


def test_reader_keeps_its_reading_for_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, used = itertools.accumulate([0.0, 1.5, 1.0, 0.0]), itertools.count()
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda _: next(used))
    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    monkeypatch.setattr(torch.cuda, "power_draw", refuse)
    reader = GpuReader(torch.device("cuda"))
    assert [reader.read() for _ in range(3)] == [GpuReading(memory_bytes=n) for n in (0, 0, 1)]
    assert GpuReader(torch.device("cpu")).read() is None
