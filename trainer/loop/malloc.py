"""Keep the memory that a step on the CPU frees, for the next step.

glibc returns large blocks to the system. The next step then gets new pages, which the system
clears: thousands per step, in a tenth of its processor time. In return, the process stays as large
as its largest step. Other allocators, and glibc settings in the environment, are not changed.
"""

import ctypes
import os
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, as in malloc.h."""
_LARGEST_IN_HEAP = 32 << 20
"""The largest value that glibc accepts. Larger blocks still go back at once."""
_KEPT_BYTES = 1 << 30
SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory(device: "torch.device") -> None:
    """Keep up to 1 GiB of freed memory, if training runs on the CPU."""
    is_glibc = platform.libc_ver()[0] == "glibc"
    if device.type != "cpu" or not is_glibc or any(name in os.environ for name in SET_BY_USER):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
    libc.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
