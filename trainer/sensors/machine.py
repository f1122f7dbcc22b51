"""The GPU and the host of a run, read now and then by a thread."""

from dataclasses import dataclass

from tokenfeed.trainer.sensors.gpu import GpuReading, sensor_of
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
    host, gpu = HostSensor(), None if uuid is None else sensor_of(uuid)

    def read() -> MachineReading:
        return MachineReading(gpu.read() if gpu else None, host.read())

    return Sampler(read, _EVERY_S)
