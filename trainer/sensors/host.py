"""The host: use of cores and memory by the machine and by the processes of a run.

A thread reads the host and the GPU, so that training never waits for a sensor.
"""

import contextlib
import threading
import time
from dataclasses import dataclass

import psutil

from tokenfeed.trainer.sensors.gpu import GpuReading, sensor_of


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReading:
    """The host at one moment. Cores in use are an average since the previous reading."""

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


class HostSensor:
    """Reads the machine, and this process with its children."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._cpu_s: dict[int, float] = {}
        self._read_at_s: float | None = None
        psutil.cpu_percent()  # the first result is meaningless

    def read(self) -> HostReading:
        """Read the host. Processes that have started or ended since the previous reading do not
        count as busy."""
        before, began_s = self._cpu_s, self._read_at_s
        self._cpu_s, self._read_at_s, resident = {}, time.monotonic(), 0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended
                times = process.cpu_times()
                self._cpu_s[process.pid] = times.user + times.system
                resident += process.memory_info().rss
        busy = None
        if began_s is not None:
            used = sum(self._cpu_s[pid] - before[pid] for pid in self._cpu_s.keys() & before.keys())
            busy = max(0.0, used) / max(self._read_at_s - began_s, 1e-9)
        cores, memory = psutil.cpu_count() or 1, psutil.virtual_memory()
        return HostReading(
            cores=cores,
            machine_cores_busy=psutil.cpu_percent() / 100 * cores,
            cores_busy=busy,
            memory_bytes=resident,
            memory_free_bytes=memory.available,
            memory_total_bytes=memory.total,
        )


class MachineSampler:
    """A thread that keeps the latest readings of the host and of a GPU.

    Cost: about 2 ms of a core every two seconds. Sampling ends if a sensor raises.

    Args:
        uuid: The UUID of the GPU; None without one.
        every_s: Seconds between two readings.
    """

    def __init__(self, uuid: str | None, every_s: float = 2.0) -> None:
        self._uuid, self._every_s = uuid, every_s
        self._end = threading.Event()
        self.gpu: GpuReading | None = None
        self.host: HostReading | None = None
        """None before the first reading and after a failed one, like `gpu`."""
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Wait at most a second for a reading under way."""
        self._end.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        try:
            gpu, host = sensor_of(self._uuid) if self._uuid else None, HostSensor()
            while not self._end.is_set():
                self.gpu, self.host = gpu.read() if gpu else None, host.read()
                self._end.wait(self._every_s)
        except Exception:  # a failed driver must not stop the training
            self.gpu = self.host = None
