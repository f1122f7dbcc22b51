"""`train --monitor-only`: GPUs and host, live, with one line of advice."""

import contextlib
import sys
import time
from collections.abc import Sequence

from rich.live import Live
from rich.text import Text

from tokenfeed.pipeline.facts import facts
from tokenfeed.trainer.sensors.gpu import GpuReading, gpus_here
from tokenfeed.trainer.sensors.host import HostReading, HostSensor

_EVERY_S = 1.0
_FULL = 0.97
_IDLE, _BUSY = 0.50, 0.90
_LITTLE_MEMORY = 0.05


def monitor() -> int:
    """Show the machine until Ctrl-C, or once if the output is not a terminal."""
    gpus, host = gpus_here(), HostSensor()

    def look() -> Text:
        return Text(view([gpu.read() for gpu in gpus], host.read()))

    look()  # rates need two readings
    time.sleep(_EVERY_S / 4)
    if not sys.stdout.isatty():
        print(look())
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(look()) as live:
        while True:
            time.sleep(_EVERY_S)
            live.update(look())
    return 0


def view(gpus: Sequence[GpuReading], host: HostReading) -> str:
    """Return a reading as text: a line for each GPU, the host, and one line of advice."""
    used = host.memory_total_bytes - host.memory_free_bytes
    return facts(
        {
            **{f"GPU {number}": _describe(gpu) for number, gpu in enumerate(gpus)},
            "GPU": "" if gpus else "NVML finds none",
            "host": f"{host.machine_cores_busy:.1f} of {host.cores} cores busy, "
            f"{used / 1e9:.1f} of {host.memory_total_bytes / 1e9:.1f} GB",
            "advice": advise(gpus, host),
        }
    )


def _describe(gpu: GpuReading) -> str:
    """Return the known figures of a GPU."""
    parts = [gpu.name or "unknown GPU"]
    if gpu.utilization is not None:
        parts.append(f"{gpu.utilization:.0%} busy in the last sampling period")
    if gpu.memory_bytes is not None and gpu.memory_total_bytes:
        parts.append(f"{gpu.memory_bytes / 1e9:.1f} of {gpu.memory_total_bytes / 1e9:.1f} GB")
    if gpu.power_watts is not None:
        limit = gpu.power_limit_watts
        parts.append(f"{gpu.power_watts:.0f} W" + (f" of {limit:.0f} W" if limit else ""))
    if gpu.clock_mhz is not None:
        parts.append(f"{gpu.clock_mhz} MHz")
    if gpu.celsius is not None:
        parts.append(f"{gpu.celsius} °C")
    if gpu.held_back_by:
        parts.append(f"held back by {', '.join(gpu.held_back_by)}")
    return ", ".join(parts)


def advise(gpus: Sequence[GpuReading], host: HostReading) -> str:
    """Return what to look at first: the finding that costs most."""
    if host.memory_free_bytes < _LITTLE_MEMORY * host.memory_total_bytes:
        return "The host is short of memory: fewer workers, or a smaller window."
    found = [line for number, gpu in enumerate(gpus) if (line := _advise_gpu(number, gpu, host))]
    if found:
        return found[0]
    if not gpus and _cores_are_full(host):
        return "All cores are busy: on a CPU that is as it should be while a model trains."
    return "Nothing to advise."


def _advise_gpu(number: int, gpu: GpuReading, host: HostReading) -> str:
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
