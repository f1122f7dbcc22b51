"""The memory that a step on the CPU frees is kept for the next one, which takes as much.

glibc gives large blocks back to the system and gets new pages for them, which the system clears:
thousands a step, and a tenth of its processor time. The price is that what the largest step took
stays with the process. Other allocators are left alone, and so is one that the environment sets.
"""

import ctypes
import os
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""As malloc.h has them."""
_LARGEST_IN_HEAP = 32 << 20
"""The most that glibc takes; what is larger goes back at once, as before."""
_KEPT_BYTES = 1 << 30
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory(device: "torch.device") -> None:
    """Keep up to a GiB of what is freed, where training runs on the CPU."""
    is_glibc = platform.libc_ver()[0] == "glibc"
    if device.type != "cpu" or not is_glibc or any(name in os.environ for name in _SET_BY_USER):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
    libc.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
