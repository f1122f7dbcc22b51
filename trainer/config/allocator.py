"""How torch allocates GPU memory. Does not import torch, which reads the settings once."""

import sys
from collections.abc import Mapping, MutableMapping

ALLOCATOR = "expandable_segments:True"
_ALLOCATOR_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Let torch grow blocks of GPU memory, so that batches of other sizes leave no gaps. Call this
    before torch is imported. A variable that the user has set stays."""
    if sys.platform == "linux" and not any(name in environment for name in _ALLOCATOR_NAMES):
        environment[_ALLOCATOR_NAMES[0]] = ALLOCATOR  # torch 2.9 to 2.11 ignores the newer name


def allocator(environment: Mapping[str, str]) -> str:
    """Return the allocator's settings, as NAME=VALUE."""
    found = [f"{name}={environment[name]}" for name in _ALLOCATOR_NAMES if name in environment]
    return " ".join(found) or "the defaults of torch"
