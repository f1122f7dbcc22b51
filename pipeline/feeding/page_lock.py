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

from tokenfeed.pipeline.feeding.stats import Counters
from tokenfeed.pipeline.windows.rank_slice import RankSlice

__all__ = ["PageLock"]

_PORTABLE = 1  # cudaHostRegisterPortable: locked for the contexts of all devices


class PageLock:
    """Page-locks memory for one device; the first refusal is a warning, and stands in the stats."""

    def __init__(self, device: torch.device, counters: Counters) -> None:
        self._device, self._counters = device, counters
        self._process = os.getpid()

    def lock(self, memory: mmap.mmap) -> Callable[[], None]:
        """Page-lock memory that workers fill.

        Returns:
            What undoes it; to be called before the memory goes, and when nothing is copied from it.
        """
        address = np.frombuffer(memory, np.uint8).ctypes.data
        with torch.cuda.device(self._device):  # the current one may be another rank's
            refusal = self._call("cudaHostRegister", address, len(memory), _PORTABLE)
        if refusal:
            self._say(f"CUDA error {refusal}")
            return _nothing
        return partial(self._unlock, address)

    def stage(self, rank_slice: RankSlice) -> RankSlice:
        """Move a slice that this process made into page-locked memory."""
        try:
            memory = (
                torch.empty(rank_slice.num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
            )
        except RuntimeError as refusal:
            self._say(str(refusal).split("\n", 1)[0])
            return rank_slice
        return RankSlice.read(rank_slice.write(memory), memory)

    def _unlock(self, address: int) -> None:
        if os.getpid() != self._process:
            return  # a forked child, whose parent goes on
        with contextlib.suppress(RuntimeError), torch.cuda.device(self._device):  # it has failed
            self._call("cudaHostUnregister", address)

    def _call(self, name: str, *arguments: int) -> int:
        """Call the CUDA runtime: its error, which nothing raises later, or 0."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(getattr(runtime, name)(*arguments))
        if error:  # stays the thread's last one until a kernel's launch raises it as its own
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self._device)
        return error

    def _say(self, refusal: str) -> None:
        if not self._counters.pageable:
            self._counters.pageable = True
            warnings.warn(
                f"the system refused to page-lock memory for {self._device} ({refusal}): copies to "
                "it are right but slower. Raise the limit (`ulimit -l`; memlock of a container), "
                "or lower `num_workers` or `window_tokens`.",
                RuntimeWarning,
                stacklevel=1,
            )


def _nothing() -> None:
    pass
