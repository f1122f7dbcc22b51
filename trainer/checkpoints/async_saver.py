"""Save checkpoints on a background thread, one at a time.

A copy of the tensors in host memory runs on its own stream, behind the next forward and backward
pass. Before the optimizer changes the weights, the computing stream waits for the copy, and the
host does not (`Saver.before_update`). The memory is allocated, and page-locked, once.

safetensors writes the file without another copy, while other threads run. The file has the same
form as those of `torch.distributed.checkpoint.HuggingFaceStorageWriter`: its metadata say where
each shard begins in its tensor. A compressed file has a zstd frame for each 64 MiB of that file.
"""

import contextlib
import errno
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import zstandard
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tokenfeed.pipeline.feeding.devices import cuda, page_lock, page_unlock
from tokenfeed.pipeline.format.storage import file_xxh3
from tokenfeed.trainer.checkpoints.checkpoint_files import (
    ZSTD_SUFFIX,
    CheckpointMeta,
    Checkpoints,
    unshared,
    write_content,
)
from tokenfeed.trainer.distributed.world import Gather, State, is_sharded_tensor

Result = TypeVar("Result")

_LONGEST_WAIT_S = 1.0
"""Python looks for signals at least this often: one that arrives just before a wait begins does not
end the wait."""
_FRAME_BYTES = 64 << 20
"""Bytes of a zstd frame before compression."""
_ZSTD_LEVEL = 1
"""Higher levels take longer, and hardly shorten weights."""

_log = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of a run on a thread, which does not keep the process alive.

    A process must not end in the normal way while the thread writes: Python would abort it. So
    `close` waits. A process that cannot wait calls `drop`, and later `os._exit`.

    If several ranks save together, each rank writes its shards into the same folder. Rank 0 does
    the rest.

    Args:
        checkpoints: The folder to write to.
        keep: Number of latest checkpoints to keep. The best one is kept as well.
        device: The device of the tensors.
        rank: The number of this rank, if several ranks save together.
        gather: Returns the values of all ranks that save, by rank.
        compress: Whether to compress the files of tensors.
        on_saved: Called on the thread after each checkpoint, on rank 0. It must not wait.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        keep: int,
        device: torch.device,
        rank: int = 0,
        gather: Gather = lambda value: [value],
        *,
        compress: bool = False,
        on_saved: Callable[[], None] = lambda: None,
    ) -> None:
        self._checkpoints, self._keep, self._compress = checkpoints, keep, compress
        self._rank, self._gather, self._on_saved = rank, gather, on_saved
        self._copy = HostCopy(device, rank)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, meta: CheckpointMeta, state: State) -> None:
        """Wait for the previous save, start to copy the state to host memory, and to write it.

        The state must not change before `before_update` was called.

        Raises:
            OSError: The previous save failed.
        """
        self.wait()
        self._copy.take(unshared(state))
        self._thread = threading.Thread(
            target=self._run, args=(meta,), daemon=True, name="checkpoint"
        )
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def before_update(self) -> None:
        """Let the device finish the copy before it changes the state. The host does not wait."""
        self._copy.before_update()

    def check(self) -> None:
        """Raise the error of a failed save, once. Does not wait."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until the checkpoint is on the disk.

        Raises:
            OSError: The save failed. Earlier checkpoints are unchanged.
        """
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(_LONGEST_WAIT_S)
            self._thread = None
        self.check()

    def wait_after_error(self) -> None:
        """Wait while another error ends the run. Log an error of the save instead of raising it."""
        try:
            self.wait()
        except Exception as error:
            _log.error("the last checkpoint was not saved: %s", error)

    def drop(self) -> None:
        """Do not wait for the checkpoint that the thread writes now. It may still be completed."""
        self._thread = None

    def close(self) -> None:
        """Wait until the checkpoint is on the disk, unless it was dropped. Release host memory."""
        try:
            self.wait_after_error()
        finally:
            self._copy.close()

    def _run(self, meta: CheckpointMeta) -> None:
        try:
            self._write(meta)
        except Exception as error:
            self._error = error

    def _write(self, meta: CheckpointMeta) -> None:
        """Write a checkpoint. Then delete all but the latest `keep` checkpoints and the best one.

        Raises:
            OSError: Writing failed on one of the ranks. Earlier checkpoints are unchanged.
        """
        checkpoints, is_main = self._checkpoints, self._rank == 0
        folder = checkpoints.temporary(meta.step)
        name = f"state-{self._rank}.safetensors{ZSTD_SUFFIX * self._compress}"
        try:
            with contextlib.ExitStack() as made:
                new = checkpoints.new(meta.step)
                self._on_all_ranks(lambda: made.enter_context(new) if is_main else None)
                files = self._on_all_ranks(lambda: (name, write_tensors(folder / name, self._copy)))
                if not is_main:
                    return
                for file, _ in files:
                    if not (folder / file).exists():  # on the disk of another machine
                        missing = f"rank 0 does not find {file}: all ranks need the same --run-dir"
                        raise OSError(errno.ENOENT, missing)
                write_content(folder, meta, dict(files))
        except OSError as error:
            reason = f"{error.strerror}. After fixing this, {checkpoints.way_on()}"
            raise OSError(error.errno, reason, str(checkpoints.path(meta.step))) from error
        checkpoints.delete_old(self._keep)
        self._on_saved()

    def _on_all_ranks(self, job: Callable[[], Result]) -> list[Result]:
        """Run a job on each rank that saves; return its results, by rank.

        Raises:
            OSError: What a job raised, on all ranks.
        """
        own: Any
        try:
            own = job()
        except OSError as error:
            own = error
        results = self._gather(own)
        for result in results:
            if isinstance(result, OSError):
                raise result
        return results


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


def _shards(tensors: Mapping[str, Tensor], rank: int) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Return what this rank saves: shards with their offsets, and on rank 0 also whole tensors."""
    found = {}
    for name, tensor in tensors.items():
        if not is_sharded_tensor(tensor):
            if rank == 0:
                found[name] = tensor, (0,) * tensor.dim()
            continue
        shard: Any = tensor
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
        self._device = device
        self._stream: torch.Stream | None = None if device.type == "cpu" else cuda.Stream(device)
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
        if self._unordered is not None:
            cuda.current_stream(self._device).wait_event(self._unordered)
            self._unordered = None

    def wait(self) -> None:
        """Wait until the copy is complete. Any thread may call this."""
        if self._copied is not None:
            self._copied.synchronize()
        self._sources = ()

    def close(self) -> None:
        """Unlock the memory after the last copy into it."""
        if self._is_locked:
            with contextlib.suppress(RuntimeError):  # the device has failed
                self.wait()
                page_unlock(self._device, self.memory.data_ptr())
        self._is_locked = False

    @contextlib.contextmanager
    def _queued(self) -> Iterator[None]:
        """Queue copies behind what the device computes now, and beside what it computes next."""
        if self._stream is None:
            yield
            return
        self._stream.wait_event(cuda.current_stream(self._device).record_event())
        with cuda.stream(self._stream):
            yield
        self._copied = self._unordered = self._stream.record_event()

    def _allocate(self, places: dict[str, _Place]) -> None:
        self.close()
        size = max((place.end for place in places.values()), default=0)
        self.places, self.memory = places, torch.empty(size, dtype=torch.uint8)
        if self._stream is not None and size:
            refusal = page_lock(self._device, self.memory.data_ptr(), size)
            self._is_locked = refusal is None
            if refusal:
                _log.warning(
                    "the system refused to page-lock %.1f GB for checkpoints (%s): the host waits "
                    "for each copy. Raise the limit (`ulimit -l`; memlock of a container).",
                    size / 1e9,
                    refusal,
                )


def write_tensors(path: Path, copy: HostCopy) -> str:
    """Wait for a copy. Write it to a file, compressed if its name ends in .zst, and sync the file.

    Return the xxh3-64 of the file's bytes.

    Raises:
        OSError: The file cannot be written.
    """
    copy.wait()
    tensors = {name: place.view(copy.memory) for name, place in copy.places.items()}
    sharding = {name: {"saved_offsets": place.offsets} for name, place in copy.places.items()}
    is_compressed = path.suffix == ZSTD_SUFFIX
    plain = path.with_suffix("") if is_compressed else path
    plain.touch()
    mode = plain.stat().st_mode
    try:
        save_file(tensors, plain, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(sharding)})
    except SafetensorError as error:  # such as a full disk
        raise OSError(errno.EIO, str(error)) from error
    plain.chmod(mode)  # safetensors makes files that only their owner may read
    if is_compressed:
        compressor = zstandard.ZstdCompressor(_ZSTD_LEVEL, write_checksum=True)
        with plain.open("rb") as source, path.open("wb") as made:
            while part := source.read(_FRAME_BYTES):
                made.write(compressor.compress(part))
        plain.unlink()
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return file_xxh3(path)
