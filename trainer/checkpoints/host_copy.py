"""A copy of tensors in host memory: what the loop pays for a checkpoint.

The copy stands in the queue of the stream that computes. So the next step cannot change what is
still being copied, and the host goes on at once; the price is that the device computes nothing
meanwhile, which the stall meter sees. The memory is allocated, and page-locked, once.
"""

import contextlib
import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.trainer.checkpoints.tensor_file import Place, lay_out

__all__ = ["HostCopy"]

_log = logging.getLogger(__name__)


class HostCopy:
    """Memory of the host for the tensors of one checkpoint at a time."""

    def __init__(self, device: torch.device) -> None:
        self._accelerator = None if device.type == "cpu" else accelerator(device)
        self._copied: torch.Event | None = None
        self._is_locked = False
        self.places: dict[str, Place] = {}
        self.memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to copy over what was taken before; the tensors may change from now on."""
        places = lay_out(tensors)
        if places != self.places:
            self._allocate(places)
        for name, place in places.items():
            place.view(self.memory).copy_(tensors[name], non_blocking=True)
        if self._accelerator is not None:
            self._copied = self._accelerator.current_stream().record_event()

    def wait(self) -> None:
        """Wait until the copy is whole; from any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Unlock the memory, when nothing is copied into it any more."""
        if self._accelerator is not None and self._is_locked:
            with contextlib.suppress(RuntimeError):  # the device has failed
                self.wait()
                self._accelerator.unlock(self.memory.data_ptr())
        self._is_locked = False

    def _allocate(self, places: dict[str, Place]) -> None:
        self.close()
        size = max((place.end for place in places.values()), default=0)
        self.places, self.memory = places, torch.empty(size, dtype=torch.uint8)
        if self._accelerator is not None and size:
            refusal = self._accelerator.lock(self.memory.data_ptr(), size)
            self._is_locked = refusal is None
            if refusal:
                _log.warning(
                    "the system refused to page-lock %.1f GB for checkpoints (%s): the host waits "
                    "for each copy. Raise the limit (`ulimit -l`; memlock of a container).",
                    size / 1e9,
                    refusal,
                )
