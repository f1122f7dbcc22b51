"""Copy micro-batches to a device ahead of use: ragged tokens on a copy stream, padded there.

Two streams are involved. The copy stream reads page-locked memory and writes new tensors; the
compute stream reads these tensors. An event orders each handover. The memory of a window returns to
its worker only after the event of the window's last copy: the host does not wait for copies, and
the worker would overwrite the tokens.

The host waits for the copy stream only if a worker needs the memory of the window before last,
whose copies were queued long before, and at the end. It never waits for the compute stream.

Page-locking can make the driver wait for the device, and takes milliseconds. Each slot of a worker
is locked at its first use and again when it has grown: in the first windows, and after
`num_workers="auto"` has started a worker. If the system refuses to lock memory, copies are correct
but slower.
"""

import contextlib
import functools
import mmap
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tokenfeed.pipeline.feeding.batch import Batch, BatchForm
from tokenfeed.pipeline.feeding.devices import cuda, page_lock, page_unlock
from tokenfeed.pipeline.feeding.on_device import build_on_device, device_inputs
from tokenfeed.pipeline.feeding.stats import Counters
from tokenfeed.pipeline.feeding.window_source import Lease, WindowSource
from tokenfeed.pipeline.windows.rank_slice import RaggedBatch, RankSlice


class PageLock:
    """Page-locks memory for one device. The first refusal by the system logs a warning and sets
    `Stats.pageable`."""

    def __init__(self, device: torch.device, counters: Counters) -> None:
        self._device, self._counters = device, counters
        self._process = os.getpid()

    def lock(self, memory: mmap.mmap) -> Callable[[], None]:
        """Page-lock the memory of a worker's buffer.

        Returns:
            A function that unlocks it. Call it when no copy from the memory is running, and before
            the memory is unmapped.
        """
        address = np.frombuffer(memory, np.uint8).ctypes.data
        if refusal := page_lock(self._device, address, len(memory)):
            self._warn(refusal)
            return _nothing
        return partial(self._unlock, address)

    def stage(self, rank_slice: RankSlice) -> RankSlice:
        """Copy a slice that this process made to page-locked memory."""
        try:
            size = rank_slice.num_bytes
            memory = (
                torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy().data
            )
        except RuntimeError as refusal:
            self._warn(str(refusal).split("\n", 1)[0])
            return rank_slice
        return RankSlice.read(rank_slice.write(memory), memory)

    def _unlock(self, address: int) -> None:
        if os.getpid() != self._process:
            return  # a forked child: the lock is the parent's
        with contextlib.suppress(RuntimeError):  # the device has failed
            page_unlock(self._device, address)

    def _warn(self, refusal: str) -> None:
        if not self._counters.pageable:
            self._counters.pageable = True
            warnings.warn(
                f"the system refused to page-lock memory for {self._device} "
                f"({refusal}): copies are correct but slower. Raise the limit (`ulimit -l`; "
                "memlock of a container), or lower `num_workers` or `window_tokens`.",
                RuntimeWarning,
                stacklevel=1,
            )


def _nothing() -> None:
    pass


COPIES_AHEAD = 2
"""Number of micro-batches copied to the device ahead of use."""
_URGENT = -1
"""Priority of the copy stream: its few small kernels start before those of a busy device."""


Batches = Generator[tuple[Batch, RaggedBatch], None, None]
"""Endless iterator. `close` waits for running copies."""


class CopyStream:
    """The stream of a device for copies and padding."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.Stream = cuda.Stream(device, _URGENT)
        self._process = os.getpid()

    def wait(self) -> None:
        """Wait until no copy is running. Raise nothing, even if the device has failed: its next use
        raises the error."""
        if os.getpid() == self._process:  # a forked child has no device
            with contextlib.suppress(RuntimeError):
                self.stream.synchronize()


copy_stream = functools.cache(CopyStream)
"""Returns the one stream of a device. torch reuses freed memory only on the stream that used it."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A batch whose copy and padding are queued on the copy stream."""

    batch: Batch
    ragged: RaggedBatch
    lease: Lease
    """Lease of the window's memory, which the copy reads until `ready` has passed."""
    ready: torch.Event


def copy_ahead(source: WindowSource, copies: CopyStream, form: BatchForm) -> Batches:
    """Yield batches whose copies and padding were queued on the copy stream in advance.

    The compute stream waits for the event of a batch; the host does not. An error of the source is
    raised after the batches of the windows before it.
    """
    ahead: deque[_Copy] = deque()
    used: deque[_Copy] = deque()  # last copy of each window whose memory is not released yet
    try:
        while True:
            if ahead and not source.is_ready():  # a finished batch never waits for a worker
                yield _hand_over(ahead.popleft(), copies)
                continue
            _release_copied(used, keep=1)
            try:
                lease = source.take()
            except Exception:
                while ahead:
                    yield _hand_over(ahead.popleft(), copies)
                raise
            for ragged in lease.rank_slice.batches():
                ahead.append(_queue_copy(ragged, lease, copies, form))
                if ragged.is_last:
                    used.append(ahead[-1])
                if len(ahead) > COPIES_AHEAD:
                    yield _hand_over(ahead.popleft(), copies)
                _release_copied(used)
    finally:
        copies.wait()  # before the leases and their memory are freed


def _queue_copy(ragged: RaggedBatch, lease: Lease, copies: CopyStream, form: BatchForm) -> _Copy:
    # Copied ahead: a batch queued while the caller evaluates may be trained on.
    with torch.inference_mode(False), cuda.stream(copies.stream):
        inputs = {
            name: tensor.to(copies.device, non_blocking=True)
            for name, tensor in device_inputs(ragged).items()
        }
        batch = build_on_device(inputs, ragged, form)
        return _Copy(batch, ragged, lease, copies.stream.record_event())


def _release_copied(used: deque[_Copy], keep: int | None = None) -> None:
    """Release the memory of copied windows; wait for the oldest ones if there are more than
    `keep`."""
    while used and (used[0].ready.query() or (keep is not None and len(used) > keep)):
        copy = used.popleft()
        copy.ready.synchronize()
        copy.lease.release()


def _hand_over(copy: _Copy, copies: CopyStream) -> tuple[Batch, RaggedBatch]:
    """Make the compute stream wait for the copy, and record the stream's use of the tensors."""
    compute_stream = cuda.current_stream(copies.device)
    compute_stream.wait_event(copy.ready)
    for tensor in copy.batch.tensors():
        tensor.record_stream(compute_stream)  # allocated on the copy stream, used on this one
    copy.ragged.drop_tokens()
    return copy.batch, copy.ragged
