"""A file of tensors in the format of safetensors, written from one piece of memory.

The memory is laid out as the file is, so that it is written and hashed in one pass, without a copy,
and other threads run on meanwhile. What the format has no name for, as complex numbers, is kept as
bytes; dtype and shape stand in checkpoint.json as well.
"""

import itertools
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
import xxhash
from torch import Tensor

__all__ = ["Place", "lay_out", "read_tensors", "write_tensors"]

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
class Place:
    """Where a tensor is among the bytes of all, and what it is."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, memory: Tensor) -> Tensor:
        """This tensor in memory of bytes."""
        return memory[self.begin : self.end].view(self.dtype).view(self.shape)


def lay_out(tensors: Mapping[str, Tensor]) -> dict[str, Place]:
    """Places without gaps; the widest numbers come first, so that all are aligned."""
    order = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    sizes = [tensor.numel() * tensor.element_size() for _, tensor in order]
    begins = itertools.accumulate(sizes, initial=0)
    return {
        name: Place(begin, begin + size, tensor.dtype, tuple(tensor.shape))
        for (name, tensor), size, begin in zip(order, sizes, begins, strict=False)
    }


def write_tensors(path: Path, places: Mapping[str, Place], memory: Tensor) -> str:
    """Write and sync a file; gives the xxh3-64 of its bytes."""
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
    """Read tensors of these dtypes and shapes into new memory on a device.

    Raises:
        SafetensorError, ValueError: The file has not these tensors.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        return {
            name: file.get_tensor(name).to(device, copy=True).view(-1).view(dtype).view(shape)
            for name, (dtype, shape) in kinds.items()
        }


def _blocks(places: Mapping[str, Place], memory: Tensor) -> Iterator[bytes | memoryview]:
    yield _header(places)
    data = memory.numpy().data
    for begin in range(0, len(data), _BLOCK_BYTES):
        yield data[begin : begin + _BLOCK_BYTES]


def _header(places: Mapping[str, Place]) -> bytes:
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
