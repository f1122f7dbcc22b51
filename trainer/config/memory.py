"""Memory: how torch allocates that of a GPU and frees that of the host, and when Python collects
garbage. Does not import torch, which reads the allocator's settings once."""

import contextlib
import ctypes
import gc
import os
import platform
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALLOCATOR = "expandable_segments:True"
_ALLOCATOR_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, as in malloc.h."""
_LARGEST_IN_HEAP = 32 << 20
"""The largest value that glibc accepts. Larger blocks still go back at once."""
_KEPT_BYTES = 1 << 30
SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Let torch grow blocks of GPU memory, so that batches of other sizes leave no gaps. Call this
    before torch is imported. A variable that the user has set stays."""
    if sys.platform == "linux" and not any(name in environment for name in _ALLOCATOR_NAMES):
        environment[_ALLOCATOR_NAMES[0]] = ALLOCATOR  # torch 2.9 to 2.11 ignores the newer name


def allocator(environment: Mapping[str, str]) -> str:
    """Return the allocator's settings, as NAME=VALUE."""
    found = [f"{name}={environment[name]}" for name in _ALLOCATOR_NAMES if name in environment]
    return " ".join(found) or "the defaults of torch"


def keep_freed_memory(device: "torch.device") -> None:
    """Keep up to 1 GiB of the memory that a step on the CPU frees, for the next step.

    glibc returns large blocks to the system. The next step then gets new pages, which the system
    clears: thousands per step, in a tenth of its processor time. In return, the process stays as
    large as its largest step. Other allocators, and glibc settings in the environment, are not
    changed.
    """
    is_glibc = platform.libc_ver()[0] == "glibc"
    if device.type != "cpu" or not is_glibc or any(name in os.environ for name in SET_BY_USER):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
    libc.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


@contextlib.contextmanager
def collections_at_log_lines() -> Iterator[None]:
    """Stop Python's garbage collector, which log lines call, for what is made from now on.

    A full collection looks at all objects that imports have made, and if it stops one rank, all
    others wait. Objects that exist now are never looked at again, unless the program has frozen
    objects itself.
    """
    freezes, was_enabled = not gc.get_freeze_count(), gc.isenabled()
    gc.disable()
    if freezes:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
