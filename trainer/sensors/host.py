"""The host: use of cores and memory, and a thread that reads the host and the GPU of a run, so that
training never waits for a sensor.
"""

import threading
from dataclasses import dataclass

import psutil

from tokenfeed.trainer.sensors.gpu import GpuReading, sensor_of


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReading:
    """The host at one moment."""

    cores: int
    cores_busy: float
    """Cores in use since the previous reading, by all processes: 1.5 is one core and a half. The
    first reading of a process has 0."""
    memory_free_bytes: int
    """Available to new processes without swapping."""
    memory_total_bytes: int


def read_host() -> HostReading:
    """Read the host."""
    cores, memory = psutil.cpu_count() or 1, psutil.virtual_memory()
    return HostReading(
        cores=cores,
        cores_busy=psutil.cpu_percent() / 100 * cores,
        memory_free_bytes=memory.available,
        memory_total_bytes=memory.total,
    )


class MachineSampler:
    """A thread that keeps the latest readings of the host and of a GPU.

    Sampling ends if a sensor raises.

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
            gpu = sensor_of(self._uuid) if self._uuid else None
            while not self._end.is_set():
                self.gpu, self.host = gpu.read() if gpu else None, read_host()
                self._end.wait(self._every_s)
        except Exception:  # a failed driver must not stop the training
            self.gpu = self.host = None
