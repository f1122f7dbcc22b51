"""The host: use of cores, memory and disks by the machine and by the processes of a run.

A thread reads the host and the GPU, so that training never waits for a sensor.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import psutil

from tokenfeed.trainer.sensors.gpu import GpuReading, GpuSensor, sensor_of

__all__ = ["HostReading", "HostSensor", "MachineReading", "Sampler", "sample_machine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReading:
    """The host at one moment. Rates cover the time since the previous reading."""

    cores: int
    machine_cores_busy: float
    """Cores in use by all processes: 1.5 is one core and a half."""
    cores_busy: float | None
    """Cores in use by the processes of the run; None at the first reading."""
    memory_bytes: int
    """Resident memory of the processes of the run. Shared memory counts for each process."""
    memory_free_bytes: int
    """Available to new processes without swapping."""
    memory_total_bytes: int
    disk_bytes_per_s: float | None
    """Read from disks by the processes of the run; None if the system does not count it."""
    cached_bytes_per_s: float | None
    """Read by the processes of the run from the page cache or pipes."""


@dataclass(frozen=True, slots=True)
class _Totals:
    at_s: float
    cpu_s: dict[int, float]
    disk_bytes: dict[int, int]
    read_bytes: dict[int, int]


class HostSensor:
    """Reads the machine, and a process with its children. Default: this process."""

    def __init__(self, pid: int | None = None) -> None:
        self._process = psutil.Process(pid)
        self._before: _Totals | None = None
        psutil.cpu_percent()  # the first result is meaningless

    def read(self) -> HostReading:
        """Read the host. Processes that have ended since the previous reading are left out."""
        family, memory = self._family(), psutil.virtual_memory()
        now, before = _totals(family), self._before
        self._before = now
        disk, read = _rates(before, now)
        cores = psutil.cpu_count() or 1
        return HostReading(
            cores=cores,
            machine_cores_busy=psutil.cpu_percent() / 100 * cores,
            cores_busy=_rate(before.cpu_s, now.cpu_s, now.at_s - before.at_s) if before else None,
            memory_bytes=sum(_resident(process) for process in family),
            memory_free_bytes=memory.available,
            memory_total_bytes=memory.total,
            disk_bytes_per_s=disk,
            cached_bytes_per_s=None if read is None else max(0.0, read - (disk or 0.0)),
        )

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return [self._process, *self._process.children(recursive=True)]
        return []


def _totals(family: list[psutil.Process]) -> _Totals:
    cpu, disk, read = {}, {}, {}
    for process in family:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            cpu[process.pid] = times.user + times.system
        with contextlib.suppress(psutil.Error, AttributeError):  # macOS has no such counters
            counters = process.io_counters()
            disk[process.pid] = counters.read_bytes
            read[process.pid] = getattr(counters, "read_chars", counters.read_bytes)
    return _Totals(time.monotonic(), cpu, disk, read)


def _rates(before: _Totals | None, now: _Totals) -> tuple[float | None, float | None]:
    """Return bytes per second from disks, and in total."""
    if before is None or not now.disk_bytes:
        return None, None
    seconds = now.at_s - before.at_s
    return (
        _rate(before.disk_bytes, now.disk_bytes, seconds),
        _rate(before.read_bytes, now.read_bytes, seconds),
    )


def _rate(before: Mapping[int, float], now: Mapping[int, float], seconds: float) -> float:
    """Return the growth per second of the processes in both readings."""
    grown = sum(value - before[pid] for pid, value in now.items() if pid in before)
    return max(0.0, grown) / max(seconds, 1e-9)


def _resident(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


_EVERY_S = 2.0

Reading = TypeVar("Reading")


class Sampler(Generic[Reading]):
    """A thread that keeps the latest reading.

    Args:
        read: Called in the thread. If it raises, sampling ends.
        every_s: Seconds between two calls.
    """

    def __init__(self, read: Callable[[], Reading], every_s: float) -> None:
        self._read, self._every_s = read, every_s
        self._end = threading.Event()
        self.latest: Reading | None = None
        """None before the first reading and after a failed one."""
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Wait at most a second for a reading under way."""
        self._end.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                self.latest = self._read()
            except Exception:  # a failed driver must not stop the training
                self.latest = None
                return
            self._end.wait(self._every_s)


@dataclass(frozen=True, slots=True)
class MachineReading:
    """The GPU and the host at one moment."""

    gpu: GpuReading | None
    """None without a GPU."""
    host: HostReading


def sample_machine(uuid: str | None) -> Sampler[MachineReading]:
    """Start a sampler of this process, its children and the GPU with a UUID.

    Cost: about 2 ms of a core every two seconds.
    """
    sensors: list[tuple[GpuSensor | None, HostSensor]] = []

    def read() -> MachineReading:
        if not sensors:  # made in the thread: a system without sensors raises here
            sensors.append((None if uuid is None else sensor_of(uuid), HostSensor()))
        gpu, host = sensors[0]
        return MachineReading(gpu.read() if gpu else None, host.read())

    return Sampler(read, _EVERY_S)
