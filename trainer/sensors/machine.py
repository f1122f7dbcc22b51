"""The GPU and the host of a run, read now and then by a thread."""

from dataclasses import dataclass

from tokenfeed.trainer.sensors.gpu import GpuReading, GpuSensor, sensor_of
from tokenfeed.trainer.sensors.host import HostReading, HostSensor
from tokenfeed.trainer.sensors.sampler import Sampler

__all__ = ["MachineReading", "sample_machine"]

_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class MachineReading:
    """Both at one moment."""

    gpu: GpuReading | None
    """None without a GPU."""
    host: HostReading


def sample_machine(uuid: str | None) -> Sampler[MachineReading]:
    """A thread, not yet begun, that reads this process, its children and the GPU of a UUID.

    Cost: some 2 ms of a core every two seconds.
    """
    return Sampler(_Machine(uuid).read, _EVERY_S)


class _Machine:
    """Sensors that are made in the thread which reads them: a system that has none raises there."""

    def __init__(self, uuid: str | None) -> None:
        self._uuid = uuid
        self._host: HostSensor | None = None
        self._gpu: GpuSensor | None = None

    def read(self) -> MachineReading:
        if self._host is None:
            self._host = HostSensor()
            self._gpu = None if self._uuid is None else sensor_of(self._uuid)
        return MachineReading(self._gpu.read() if self._gpu else None, self._host.read())
