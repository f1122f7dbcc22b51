"""The most memory that tensors take at once, counted as operators make them.

Counts storages, so it works on tensors without values too, of any device; an allocator would round
each up to 512 bytes, and so does this. What a kernel takes for itself while it runs is not seen.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tokenfeed.pipeline.arithmetic import round_up

__all__ = ["PeakBytes"]

_GRAIN = 512  # of CUDA's allocator


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, follows the memory of tensors that are made in this thread.

    with PeakBytes("cuda") as memory:
        step()
    print(memory.peak)
    """

    def __init__(self, device_type: str = "cpu") -> None:
        """
        Args:
            device_type: Tensors of other devices are not counted.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._device_type = device_type
        self._known: set[int] = set()

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor that is there already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = round_up(storage.nbytes(), _GRAIN)
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size).atexit = False

    def forget_peak(self) -> None:
        """Begin again from what is there now."""
        self.peak = self.now

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor) and value.device.type == self._device_type:
                self.add(value)
        return out

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
