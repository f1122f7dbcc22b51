"""One line of advice on a machine at work, from its sensors alone."""

from collections.abc import Sequence

from tokenfeed.trainer.sensors.gpu import GpuReading
from tokenfeed.trainer.sensors.host import HostReading

__all__ = ["advise"]

_FULL = 0.97
_IDLE, _BUSY = 0.50, 0.90
_LITTLE_MEMORY = 0.05


def advise(gpus: Sequence[GpuReading], host: HostReading) -> str:
    """What to look at first; of several things the one that costs most."""
    if host.memory_free_bytes < _LITTLE_MEMORY * host.memory_total_bytes:
        return "The host is short of memory: fewer workers, or a smaller window."
    found = [line for number, gpu in enumerate(gpus) if (line := _of_gpu(number, gpu, host))]
    if found:
        return found[0]
    if not gpus and _cores_are_full(host):
        return "All cores are busy: on a CPU that is as it should be while a model trains."
    return "Nothing to advise."


def _of_gpu(number: int, gpu: GpuReading, host: HostReading) -> str:
    used, name = gpu.utilization, f"GPU {number}"
    if used is None:
        return ""
    if used < _IDLE and _cores_are_full(host):
        return f"{name} is idle while all cores are busy: it waits for the host. See report.json."
    if used < _IDLE:
        return f"{name} is idle half of the time or more: look at the stall by cause of its run."
    if gpu.held_back_by:
        return f"The clock of {name} is held back by {', '.join(gpu.held_back_by)}."
    if (gpu.memory_bytes or 0) > _FULL * (gpu.memory_total_bytes or 1):
        return f"The memory of {name} is nearly full: --recompute, or smaller micro-batches."
    return ""


def _cores_are_full(host: HostReading) -> bool:
    return host.machine_cores_busy > _BUSY * host.cores
