"""Batches on a device: tokens are copied ahead of use, then widened, padded and labelled there.

Two streams are involved. The copy stream reads page-locked memory and writes new tensors; the
compute stream reads these tensors. An event orders each handover. The memory of a window returns to
its worker only after the event of the window's last copy: the host does not wait for copies, and
the worker would overwrite the tokens.

The host waits for the copy stream only if a worker needs the memory of the window before last,
whose copies were queued long before, and at the end. It never waits for the compute stream, and
making a batch never synchronises, because the host knows every shape. Ids and labels are made at
once. Positions and `seq_idx` are made on first use, on the current stream.

Page-locking can make the driver wait for the device, and takes milliseconds. Each slot of a worker
is locked at its first use and again when it has grown: in the first windows. If the system refuses
to lock memory, copies are correct but slower.
"""

import contextlib
import functools
import mmap
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial

import numpy as np
import torch

from tokenfeed.pipeline.feeding.batch import Batch, BatchForm, Made, make_batches
from tokenfeed.pipeline.feeding.devices import cuda, page_lock, page_unlock
from tokenfeed.pipeline.feeding.stats import Counters
from tokenfeed.pipeline.feeding.window_source import COPIES_AHEAD, Lease, WindowSource
from tokenfeed.pipeline.planning.batching import Round
from tokenfeed.pipeline.windows.rank_slice import TARGETS, RankSlice


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
        rank_slice.write(memory)
        return RankSlice.read(memory)

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


_URGENT = -1
"""Priority of the copy stream: its few small kernels start before those of a busy device."""


Batches = Generator[Made, None, None]
"""Endless iterator of batches and their rounds. `close` waits for running copies."""


class CopyStream:
    """The stream of a device for copies and what follows them."""

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

    def make(self, batches: Iterator[Made]) -> Made | None:
        """Queue the copies and kernels of the next batch. Return None after the last batch."""
        # Copied ahead: a batch queued while the caller evaluates may be trained on.
        with torch.inference_mode(False), cuda.stream(self.stream):
            if (made := next(batches, None)) and made[0] is not None:
                made[0][TARGETS]
            return made

    def hand_over(self, batch: Batch | None, ready: torch.Event) -> None:
        """Make the compute stream wait for a batch, and record the stream's use of the tensors."""
        compute_stream = cuda.current_stream(self.device)
        compute_stream.wait_event(ready)
        for tensor in batch.tensors() if batch is not None else ():
            tensor.record_stream(compute_stream)  # allocated on the copy stream, used on this one


copy_stream = functools.cache(CopyStream)
"""Returns the one stream of a device. torch reuses freed memory only on the stream that used it."""


def copy_ahead(
    source: WindowSource,
    copies: CopyStream,
    form: BatchForm,
    counters: Counters,
    prefetch: int = COPIES_AHEAD,
) -> Batches:
    """Yield batches whose copies and kernels were queued on the copy stream in advance.

    `prefetch` is the number of batches that are ready ahead of the one that is yielded.

    The compute stream waits for the event of a batch; the host does not. An error of the source is
    raised after the batches of the windows before it.
    """
    ahead: deque[tuple[Batch | None, Round, torch.Event]] = deque()
    used: deque[tuple[Lease, torch.Event]] = deque()
    """Windows whose memory is not released yet, and the events of their last copies."""

    def hand_over() -> Made:
        batch, done, ready = ahead.popleft()
        copies.hand_over(batch, ready)
        return batch, done

    try:
        while True:
            if ahead and not source.is_ready():  # a finished batch never waits for a worker
                yield hand_over()
                continue
            _release_copied(used, keep=1)
            try:
                lease = source.take()
            except Exception:
                while ahead:
                    yield hand_over()
                raise
            counters.add_window(lease.seconds, lease.ready, lease.fetched)
            batches = make_batches(lease.rank_slice, form, copies.device)
            while made := copies.make(batches):
                ready = copies.stream.record_event()
                ahead.append((*made, ready))
                if made[1].ends_window:
                    used.append((lease, ready))
                if len(ahead) > prefetch:
                    yield hand_over()
                _release_copied(used)
    finally:
        copies.wait()  # before the leases and their memory are freed


def _release_copied(used: deque[tuple[Lease, torch.Event]], keep: int | None = None) -> None:
    """Release the memory of copied windows; wait for the oldest ones if there are more than
    `keep`."""
    while used and (used[0][1].query() or (keep is not None and len(used) > keep)):
        lease, ready = used.popleft()
        ready.synchronize()
        lease.release()
