"""Copies of tensors in host memory, and writing them as a safetensors file.

The copy is queued on the stream that computes. So the next step cannot change tensors that are
still being copied, and the host continues at once. The price is that the device computes nothing
during the copy, which the stall meter sees. The memory is allocated, and page-locked, once.

The memory is laid out like the file, so it is written and hashed in one pass, without a copy, and
other threads run meanwhile. Types that safetensors does not have, such as complex numbers, are
stored as bytes; checkpoint.json has their dtype and shape.
"""

import contextlib
import itertools
import json
import logging
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
import xxhash
from torch import Tensor

from tokenfeed.pipeline.feeding.devices import accelerator

__all__ = ["HostCopy", "TensorPlace", "lay_out", "read_tensors", "write_tensors"]

_BLOCK_BYTES = 1 << 22
_ALIGNMENT = 8
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor among the bytes of all tensors, with its dtype and shape."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, memory: Tensor) -> Tensor:
        """Return this tensor as a view of `memory`, a tensor of bytes."""
        return memory[self.begin : self.end].view(self.dtype).view(self.shape)


def lay_out(tensors: Mapping[str, Tensor]) -> dict[str, TensorPlace]:
    """Return a place for each tensor, without gaps.

    Tensors with the widest numbers come first, so that each tensor is aligned.
    """
    order = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    sizes = [tensor.numel() * tensor.element_size() for _, tensor in order]
    begins = itertools.accumulate(sizes, initial=0)
    return {
        name: TensorPlace(begin, begin + size, tensor.dtype, tuple(tensor.shape))
        for (name, tensor), size, begin in zip(order, sizes, begins, strict=False)
    }


def write_tensors(path: Path, places: Mapping[str, TensorPlace], memory: Tensor) -> str:
    """Write and sync a file. Return the xxh3-64 of its bytes."""
    digest = xxhash.xxh3_64()
    with open(path, "wb") as file:
        for block in _blocks(places, memory):
            file.write(block)
            digest.update(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def read_tensors(
    path: Path, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
) -> dict[str, Tensor]:
    """Read tensors of the given dtypes and shapes into new memory on a device.

    Raises:
        SafetensorError, ValueError: The file lacks one of these tensors.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        return {
            name: file.get_tensor(name).to(device, copy=True).view(-1).view(dtype).view(shape)
            for name, (dtype, shape) in kinds.items()
        }


def _blocks(places: Mapping[str, TensorPlace], memory: Tensor) -> Iterator[bytes | memoryview]:
    yield _header(places)
    data = memory.numpy().data
    for begin in range(0, len(data), _BLOCK_BYTES):
        yield data[begin : begin + _BLOCK_BYTES]


def _header(places: Mapping[str, TensorPlace]) -> bytes:
    entries = {
        name: {
            "dtype": _NAMES.get(place.dtype, "U8"),
            "shape": place.shape if place.dtype in _NAMES else [place.end - place.begin],
            "data_offsets": [place.begin, place.end],
        }
        for name, place in places.items()
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


_log = logging.getLogger(__name__)


class HostCopy:
    """Page-locked host memory for the tensors of one checkpoint at a time."""

    def __init__(self, device: torch.device) -> None:
        self._accelerator = None if device.type == "cpu" else accelerator(device)
        self._copied: torch.Event | None = None
        self._is_locked = False
        self.places: dict[str, TensorPlace] = {}
        self.memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Start to copy tensors, over those of the previous call.

        The tensors may change as soon as this returns: the copy is queued on the device's stream.
        """
        places = lay_out(tensors)
        if places != self.places:
            self._allocate(places)
        for name, place in places.items():
            place.view(self.memory).copy_(tensors[name], non_blocking=True)
        if self._accelerator is not None:
            self._copied = self._accelerator.current_stream().record_event()

    def wait(self) -> None:
        """Wait until the copy is complete. Any thread may call this."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Unlock the memory after the last copy into it."""
        if self._accelerator is not None and self._is_locked:
            with contextlib.suppress(RuntimeError):  # the device has failed
                self.wait()
                self._accelerator.unlock(self.memory.data_ptr())
        self._is_locked = False

    def _allocate(self, places: dict[str, TensorPlace]) -> None:
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
