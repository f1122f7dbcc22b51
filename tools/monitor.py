"""`train --monitor-only`: GPUs and host, live, with one line of advice."""

import contextlib
import sys
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenfeed.trainer.sensors.gpu import GpuReading, gpus_here
from tokenfeed.trainer.sensors.host import HostReading, HostSensor

__all__ = ["advise", "monitor", "view"]

_EVERY_S = 1.0
_CELLS = 20
_FULL = 0.97
_IDLE, _BUSY = 0.50, 0.90
_LITTLE_MEMORY = 0.05


def monitor() -> int:
    """Show the machine until Ctrl-C, or once if the output is not a terminal."""
    gpus, host = gpus_here(), HostSensor()
    console = Console()

    def look() -> Group:
        return view([gpu.read() for gpu in gpus], host.read())

    look()  # rates need two readings
    time.sleep(_EVERY_S / 4)
    if not sys.stdout.isatty():
        console.print(look())
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(look(), console=console) as live:
        while True:
            time.sleep(_EVERY_S)
            live.update(look())
    return 0


def view(gpus: Sequence[GpuReading], host: HostReading) -> Group:
    """Return a reading as a table, with the advice below it."""
    table = Table.grid(padding=(0, 2))
    for number, gpu in enumerate(gpus):
        _add_gpu(table, number, gpu)
    if not gpus:
        table.add_row("GPU", "NVML finds none")
    _add_host(table, host)
    return Group(table, Text(advise(gpus, host), style="bold"))


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


def _add_gpu(table: Table, number: int, gpu: GpuReading) -> None:
    table.add_row(Text(f"GPU {number}", style="bold"), gpu.name or "")
    _share(table, "  busy", gpu.utilization, "of the last sampling period")
    if gpu.memory_bytes is not None and gpu.memory_total_bytes:
        share = gpu.memory_bytes / gpu.memory_total_bytes
        _share(table, "  memory", share, f"{_gb(gpu.memory_bytes)} GB")
    if gpu.power_watts is not None:
        limit = gpu.power_limit_watts
        text = f"{gpu.power_watts:.0f} W" + (f" of {limit:.0f} W" if limit else "")
        _share(table, "  power", gpu.power_watts / limit if limit else None, text)
    facts = [
        f"{gpu.clock_mhz} MHz" if gpu.clock_mhz is not None else "",
        f"{gpu.celsius} °C" if gpu.celsius is not None else "",
        f"held back by {', '.join(gpu.held_back_by)}" if gpu.held_back_by else "",
    ]
    table.add_row("  clock", ", ".join(filter(None, facts)))


def _add_host(table: Table, host: HostReading) -> None:
    table.add_row(Text("host", style="bold"))
    busy = f"{host.machine_cores_busy:.1f} of {host.cores} cores"
    _share(table, "  cores", host.machine_cores_busy / host.cores, busy)
    used = host.memory_total_bytes - host.memory_free_bytes
    _share(table, "  memory", used / host.memory_total_bytes, f"{_gb(used)} GB")


def _share(table: Table, name: str, share: float | None, text: str) -> None:
    if share is None:
        table.add_row(name, text)
        return
    full = min(_CELLS, round(share * _CELLS))
    table.add_row(name, f"{'█' * full}{'·' * (_CELLS - full)} {share:>4.0%}  {text}")


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f}"
