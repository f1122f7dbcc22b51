"""`train --monitor-only`: the load of GPUs and host, once a second until Ctrl-C."""

import contextlib
import sys
import time
from typing import Any

import psutil
from rich.live import Live
from rich.text import Text

from tokenfeed.pipeline.text import facts


def monitor() -> int:
    """Show the machine until Ctrl-C, or once if the output is not a terminal."""
    psutil.cpu_percent()  # a rate needs two readings
    time.sleep(0.25)
    if not sys.stdout.isatty():
        print(view())
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(Text(view())) as live:
        while True:
            time.sleep(1.0)
            live.update(Text(view()))
    return 0


def view() -> str:
    """Return a reading as text: a line for each GPU, and the host."""
    cores, memory = psutil.cpu_count() or 1, psutil.virtual_memory()
    gpus = _gpus()
    return facts(
        {
            **{f"GPU {number}": gpu for number, gpu in enumerate(gpus)},
            "GPU": "" if gpus else "NVML finds none",
            "host": f"{psutil.cpu_percent() / 100 * cores:.1f} of {cores} cores busy, "
            f"{(memory.total - memory.available) / 1e9:.1f} of {memory.total / 1e9:.1f} GB",
        }
    )


def _gpus() -> list[str]:
    """Return name, utilization, memory and power of each GPU; a GPU that NVML cannot read ends the
    list."""
    import pynvml

    found = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(number)
            memory: Any = pynvml.nvmlDeviceGetMemoryInfo(gpu)
            busy = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu
            found.append(
                f"{pynvml.nvmlDeviceGetName(gpu)}, {busy} % busy, "
                f"{memory.used / 1e9:.1f} of {memory.total / 1e9:.1f} GB, "
                f"{pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3:.0f} W"
            )
    return found
