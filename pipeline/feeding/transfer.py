"""Host to device, ahead of use: ragged tokens on a copy stream, padded there, never waited for.

Two streams meet here. The copy stream reads page-locked memory and writes new tensors; the compute
stream reads these. An event orders each handover. A window's memory goes back to the workers only
when the event of its last copy has passed: the host runs on, and they would fill it again.
"""

import mmap
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import torch

from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.on_device import build_on_device, device_inputs
from tokenfeed.pipeline.feeding.source import Lease, WindowSource
from tokenfeed.pipeline.planning.share import RaggedBatch, Share

__all__ = ["copy_ahead", "page_lock", "stage"]

_COPIES_AHEAD = 2
"""Micro-batches copied to the device before they are asked for: one in use, one in flight."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A batch whose copy and padding are queued on the copy stream."""

    batch: Batch
    ragged: RaggedBatch
    lease: Lease
    """The window's memory, which the copy reads until `ready` has passed."""
    ready: torch.cuda.Event


def copy_ahead(
    source: WindowSource, device: torch.device, pad_id: int
) -> Generator[tuple[Batch, RaggedBatch], None, None]:
    """Deliver batches whose copies and padding were queued on a copy stream beforehand.

    The compute stream waits for a batch's event, the host does not, except for memory that a
    worker needs and for what is left at the end; both were queued long before.
    """
    copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: deque[_Copy] = deque()
    used: deque[_Copy] = deque()  # last copies of windows whose memory is not given back yet
    try:
        while True:
            if ahead and not source.is_ready():  # a finished batch never waits for a worker
                yield _hand_over(ahead.popleft(), device)
                continue
            _give_back(used, keep=1)
            lease = source.take()
            for ragged in lease.share.batches():
                ahead.append(_queue_copy(ragged, lease, device, copy_stream, pad_id))
                if ragged.is_last:
                    used.append(ahead[-1])
                if len(ahead) > _COPIES_AHEAD:
                    yield _hand_over(ahead.popleft(), device)
                _give_back(used)
    finally:
        for copy in (*used, *ahead):
            copy.ready.synchronize()


def page_lock(memory: mmap.mmap) -> Callable[[], None]:
    """Page-lock memory that workers fill, so that copies from it run beside the host.

    Returns:
        What undoes it; to be called before the memory goes. Where the system refuses, copies are
        slower but right, and there is nothing to undo.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = np.frombuffer(memory, np.uint8).ctypes.data
    if int(runtime.cudaHostRegister(address, len(memory), 0)) != 0:
        return lambda: None

    def undo() -> None:
        runtime.cudaHostUnregister(address)

    return undo


def stage(share: Share) -> Share:
    """Move a share that this process made into page-locked memory."""
    memory = torch.empty(share.num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
    return Share.read(share.write(memory), memory)


def _queue_copy(
    ragged: RaggedBatch,
    lease: Lease,
    device: torch.device,
    copy_stream: torch.cuda.Stream,
    pad_id: int,
) -> _Copy:
    with torch.cuda.stream(copy_stream):
        inputs = {
            name: tensor.to(device, non_blocking=True)
            for name, tensor in device_inputs(ragged).items()
        }
        batch = build_on_device(inputs, ragged, pad_id)
        return _Copy(batch, ragged, lease, copy_stream.record_event())


def _give_back(used: deque[_Copy], keep: int | None = None) -> None:
    """Return the memory of windows that were copied; wait for the oldest if more than `keep`."""
    while used and (used[0].ready.query() or (keep is not None and len(used) > keep)):  # type: ignore[no-untyped-call]
        copy = used.popleft()
        copy.ready.synchronize()
        copy.lease.release()


def _hand_over(copy: _Copy, device: torch.device) -> tuple[Batch, RaggedBatch]:
    """Make the stream that computes wait for the copy, and own its tensors."""
    compute_stream = torch.cuda.current_stream(device)
    compute_stream.wait_event(copy.ready)
    for tensor in copy.batch.tensors():
        tensor.record_stream(compute_stream)  # allocated on the copy stream, used on this one
    copy.ragged.drop_tokens()
    return copy.batch, copy.ragged
