"""`train --monitor-only`: GPUs and host, live."""

import contextlib
import sys
import time
from collections.abc import Sequence

from rich.live import Live
from rich.text import Text

from tokenfeed.pipeline.facts import facts
from tokenfeed.trainer.sensors.machine import GpuReading, HostReading, gpus_here, read_host

_EVERY_S = 1.0


def monitor() -> int:
    """Show the machine until Ctrl-C, or once if the output is not a terminal."""
    gpus = gpus_here()

    def look() -> Text:
        return Text(view([gpu.read() for gpu in gpus], read_host()))

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
    """Return a reading as text: a line for each GPU, and the host."""
    used = host.memory_total_bytes - host.memory_free_bytes
    return facts(
        {
            **{f"GPU {number}": _describe(gpu) for number, gpu in enumerate(gpus)},
            "GPU": "" if gpus else "NVML finds none",
            "host": f"{host.cores_busy:.1f} of {host.cores} cores busy, "
            f"{used / 1e9:.1f} of {host.memory_total_bytes / 1e9:.1f} GB",
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
    return ", ".join(parts)
