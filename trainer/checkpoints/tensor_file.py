"""Copies of tensors in host memory, and writing them as a safetensors file.

A copy runs on its own stream, behind the next forward and backward pass. Before the optimizer
changes the weights, the computing stream waits for the copy, and the host does not
(`HostCopy.before_update`). The memory is allocated, and page-locked, once.

safetensors writes the file without another copy, while other threads run. The file has the same
form as those of `torch.distributed.checkpoint.HuggingFaceStorageWriter`: its metadata say where
each shard begins in its tensor.
"""

import contextlib
import errno
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.pipeline.format.storage import file_xxh3

_STORED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a shard among the bytes of all shards, its form, and where it begins in the
    whole tensor."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def view(self, memory: Tensor) -> Tensor:
        """Return this shard as a view of `memory`, a tensor of bytes."""
        return memory[self.begin : self.end].view(self.dtype).view(self.shape)


def is_sharded_tensor(tensor: Tensor) -> bool:
    """Return whether ranks hold shards of this tensor. Importing DTensor to ask takes a second."""
    return hasattr(tensor, "to_local")


def stored_form(tensor: Tensor) -> Tensor:
    """Return a view of a tensor in a dtype that safetensors has: of complex numbers their parts,
    of rare dtypes their bits."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.dtype in _STORED else tensor.view(_INTEGERS[tensor.dtype.itemsize])


def _shards(tensors: Mapping[str, Tensor], rank: int) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Return what this rank saves: shards with their offsets, and on rank 0 also whole tensors."""
    found = {}
    for name, tensor in tensors.items():
        if not is_sharded_tensor(tensor):
            if rank == 0:
                whole = stored_form(tensor)
                found[name] = whole, (0,) * whole.dim()
            continue
        shard: Any = stored_form(tensor)
        places = zip(shard.placements, shard.device_mesh.get_coordinate(), strict=True)
        is_replica = any(place.is_replicate() and number for place, number in places)
        own = shard.to_local()
        if not is_replica and (own.numel() or rank == 0):
            (chunk,) = shard.__create_chunk_list__()
            found[name] = own, tuple(chunk.offsets)
    return found


def _lay_out(shards: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> dict[str, _Place]:
    """Return a place for each shard, without gaps. Those with the widest numbers come first, so
    that each shard is aligned."""
    order = sorted(shards.items(), key=lambda item: -item[1][0].element_size())
    sizes = [own.numel() * own.element_size() for _, (own, _) in order]
    begins = itertools.accumulate(sizes, initial=0)
    return {
        name: _Place(begin, begin + size, own.dtype, tuple(own.shape), offsets)
        for (name, (own, offsets)), size, begin in zip(order, sizes, begins, strict=False)
    }


class HostCopy:
    """Page-locked host memory for one rank's shards of one checkpoint at a time."""

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        self._accelerator = None if device.type == "cpu" else accelerator(device)
        self._stream = self._accelerator.new_stream(0) if self._accelerator else None
        self._rank = rank
        self._copied: torch.Event | None = None
        self._unordered: torch.Event | None = None
        """The latest copy, until the computing stream waits for it."""
        self._is_locked = False
        self._sources: Any = ()
        self.places: dict[str, _Place] = {}
        self.memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Start to copy tensors, over those of the previous call.

        The tensors must not change before `before_update` was called.
        """
        shards = _shards(tensors, self._rank)
        places = _lay_out(shards)
        if places != self.places:
            self._allocate(places)
        with self._queued():
            for name, place in places.items():
                place.view(self.memory).copy_(shards[name][0], non_blocking=True)
        self._sources = shards  # until the copy is complete, no other tensor may get their memory

    def before_update(self) -> None:
        """Let the computing stream wait for the copy. The host does not wait."""
        if self._accelerator is not None and self._unordered is not None:
            self._accelerator.current_stream().wait_event(self._unordered)
            self._unordered = None

    def wait(self) -> None:
        """Wait until the copy is complete. Any thread may call this."""
        if self._copied is not None:
            self._copied.synchronize()
        self._sources = ()

    def close(self) -> None:
        """Unlock the memory after the last copy into it."""
        if self._accelerator is not None and self._is_locked:
            with contextlib.suppress(RuntimeError):  # the device has failed
                self.wait()
                self._accelerator.unlock(self.memory.data_ptr())
        self._is_locked = False

    @contextlib.contextmanager
    def _queued(self) -> Iterator[None]:
        """Queue copies behind what the device computes now, and beside what it computes next."""
        if self._accelerator is None or self._stream is None:
            yield
            return
        self._stream.wait_event(self._accelerator.current_stream().record_event())
        with self._accelerator.on(self._stream):
            yield
        self._copied = self._unordered = self._stream.record_event()

    def _allocate(self, places: dict[str, _Place]) -> None:
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


def write_tensors(path: Path, copy: HostCopy) -> str:
    """Wait for a copy. Write it to a file and sync the file. Return the xxh3-64 of its bytes.

    Raises:
        OSError: The file cannot be written.
    """
    copy.wait()
    tensors = {name: place.view(copy.memory) for name, place in copy.places.items()}
    sharding = {name: {"saved_offsets": place.offsets} for name, place in copy.places.items()}
    try:
        save_file(tensors, path, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(sharding)})
    except SafetensorError as error:  # such as a full disk
        raise OSError(errno.EIO, str(error)) from error
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return file_xxh3(path)
