"""Page-locked memory: what a device copies from while the host goes on.

A page lock may make the driver wait for the device, and takes milliseconds: each slot of a worker
is locked at its first use and again when it grew, so that happens in the first windows, and after
"auto" has started a worker. Where the system refuses, copies are right but slower.
"""

import contextlib
import mmap
import os
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.pipeline.feeding.stats import Counters
from tokenfeed.pipeline.windows.rank_slice import RankSlice

__all__ = ["PageLock"]


class PageLock:
    """Page-locks memory for one device; the first refusal is a warning, and stands in the stats."""

    def __init__(self, device: torch.device, counters: Counters) -> None:
        self._accelerator, self._counters = accelerator(device), counters
        self._process = os.getpid()

    def lock(self, memory: mmap.mmap) -> Callable[[], None]:
        """Page-lock memory that workers fill.

        Returns:
            What undoes it; to be called before the memory goes, and when nothing is copied from it.
        """
        address = np.frombuffer(memory, np.uint8).ctypes.data
        if refusal := self._accelerator.lock(address, len(memory)):
            self._say(refusal)
            return _nothing
        return partial(self._unlock, address)

    def stage(self, rank_slice: RankSlice) -> RankSlice:
        """Move a slice that this process made into page-locked memory."""
        try:
            size = rank_slice.num_bytes
            memory = (
                torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy().data
            )
        except RuntimeError as refusal:
            self._say(str(refusal).split("\n", 1)[0])
            return rank_slice
        return RankSlice.read(rank_slice.write(memory), memory)

    def _unlock(self, address: int) -> None:
        if os.getpid() != self._process:
            return  # a forked child, whose parent goes on
        with contextlib.suppress(RuntimeError):  # the device has failed
            self._accelerator.unlock(address)

    def _say(self, refusal: str) -> None:
        if not self._counters.pageable:
            self._counters.pageable = True
            warnings.warn(
                f"the system refused to page-lock memory for {self._accelerator.device} "
                f"({refusal}): copies to it are right but slower. Raise the limit (`ulimit -l`; "
                "memlock of a container), or lower `num_workers` or `window_tokens`.",
                RuntimeWarning,
                stacklevel=1,
            )


def _nothing() -> None:
    pass
