"""Readings of the machine at a progress line: the GPU by NVML, processors and memory by psutil.

Each figure is one call, without a thread, and nothing waits for the GPU. Imports no torch.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """The load of a GPU, by all processes that use it."""

    gpu_bytes: int
    """Memory in use."""
    gpu_total_bytes: int
    gpu_busy: float | None
    """Share of the time in which some kernel ran, since the previous reading; None if the GPU does
    not report it, such as a part of a GPU (MIG)."""


class Gpu:
    """A GPU, as NVML reads it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._latest_sample = time.time_ns() // 1000
        """NVML's time of the latest sample that was read, in microseconds."""

    @classmethod
    def of_uuid(cls, uuid: str) -> "Gpu | None":
        """Return the GPU with this UUID; None if NVML does not find it.

        NVML's numbers ignore CUDA_VISIBLE_DEVICES and CUDA's order, so the same number may be the
        card of another user.
        """
        import pynvml

        for kind in ("GPU", "MIG"):
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                return cls(pynvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}"))
        return None

    @classmethod
    def all(cls) -> "Iterator[Gpu]":
        """Yield the GPUs of this machine."""
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            for number in range(pynvml.nvmlDeviceGetCount()):
                yield cls(pynvml.nvmlDeviceGetHandleByIndex(number))

    def read(self) -> GpuReading | None:
        """Return the load now; None if NVML fails, such as after the GPU has failed."""
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            memory: Any = pynvml.nvmlDeviceGetMemoryInfo(self.handle)
            used, total = int(memory.used), int(memory.total)
            return GpuReading(gpu_bytes=used, gpu_total_bytes=total, gpu_busy=self._busy())
        return None

    def describe(self, reading: GpuReading) -> str:
        """Return the name, the load and the power of the GPU."""
        import pynvml

        used, total, busy = reading.gpu_bytes, reading.gpu_total_bytes, reading.gpu_busy
        parts = [
            str(pynvml.nvmlDeviceGetName(self.handle)),
            "load unknown" if busy is None else f"{100 * busy:.0f} % busy",
            f"{used / 1e9:.1f} of {total / 1e9:.1f} GB ({100 * used / total:.0f} %)",
        ]
        with contextlib.suppress(pynvml.NVMLError):
            parts.append(f"{pynvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3:.0f} W")
        return ", ".join(parts)

    def workers(self) -> dict[str, float]:
        """Return the fewest child processes of a process that computes on the GPU; empty if the
        processes are unknown, such as those of another container."""
        import pynvml

        with contextlib.suppress(pynvml.NVMLError, psutil.Error):
            processes: Any = pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
            counts = [len(psutil.Process(each.pid).children()) for each in processes]
            return {"workers": min(counts)} if counts else {}
        return {}

    def _busy(self) -> float | None:
        """Return the mean of NVML's samples since the previous call; without samples, the load of
        the latest moment."""
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            _, samples = pynvml.nvmlDeviceGetSamples(
                self.handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, self._latest_sample
            )
            new = [each for each in samples if each.timeStamp > self._latest_sample]
            if new:
                self._latest_sample = max(each.timeStamp for each in new)
                return float(sum(each.sampleValue.uiVal for each in new) / len(new) / 100)
        with contextlib.suppress(pynvml.NVMLError):
            rates: Any = pynvml.nvmlDeviceGetUtilizationRates(self.handle)
            return float(rates.gpu / 100)
        return None


class Host:
    """The processors and the memory of this machine."""

    def __init__(self) -> None:
        self.read()  # the first reading has nothing to compare with

    def read(self) -> Mapping[str, float]:
        """Return shares from 0 to 1: of busy processors since the previous call, of the busiest
        one, and of memory in use. Empty if the system hides them, as a sandbox without /proc."""
        with contextlib.suppress(OSError, psutil.Error):
            cores = psutil.cpu_percent(percpu=True) or [0.0]
            return {
                "cpu_busy": sum(cores) / len(cores) / 100,
                "core_busy": max(cores) / 100,
                "ram_used": psutil.virtual_memory().percent / 100,
            }
        return {}
