"""Batches on a device: tokens are copied ahead of use, then widened, padded and labelled there.

Two streams are involved. The copy stream reads page-locked memory and writes new tensors; the
compute stream reads these tensors. An event orders each handover. The memory of a window returns to
its worker only after the event of the window's last copy: the host does not wait for copies, and
the worker would overwrite the tokens.

The host waits for the copy stream only if a worker needs the memory of the window before last,
whose copies were queued long before, and at the end. It never waits for the compute stream, and
building a batch never synchronises, because the host knows every shape. Ids and labels are built at
once. Masks, positions and `seq_idx` are built on first use, on the current stream.

Page-locking can make the driver wait for the device, and takes milliseconds. Each slot of a worker
is locked at its first use and again when it has grown: in the first windows. If the system refuses
to lock memory, copies are correct but slower.

Shapes: B sequences, T padded length, N tokens, S segments.
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

from tokenfeed.pipeline.feeding.batch import (
    ATTENTION_MASK,
    POSITION_IDS,
    SEGMENTS,
    SEQ_IDX,
    Batch,
    BatchForm,
    Tensors,
    paddings,
)
from tokenfeed.pipeline.feeding.devices import cuda, page_lock, page_unlock
from tokenfeed.pipeline.feeding.stats import Counters
from tokenfeed.pipeline.feeding.window_source import COPIES_AHEAD, Lease, WindowSource
from tokenfeed.pipeline.format.schema import IGNORED, INPUT_IDS, no_target
from tokenfeed.pipeline.windows.rank_slice import TARGETS, RaggedBatch, RankSlice

_LENGTHS = "sequence_lengths"


def device_inputs(ragged: RaggedBatch) -> Tensors:
    """Return the host tensors to copy to the device, as views where possible.

    These are the columns with one value per token, shape (N,), in storage dtype, and those of
    `sequence_lengths`, `segments`, `ignored` and `row_targets` that the batch needs.
    """
    inputs = {name: torch.from_numpy(ragged.of_tokens(name)) for name in ragged.token_columns}
    ids = ragged.of_tokens(INPUT_IDS)  # torch supports few operations on unsigned integers
    inputs[INPUT_IDS] = torch.from_numpy(ids.view(f"i{ids.itemsize}"))
    for name, values in ragged.staged().items():
        if name != _LENGTHS or not ragged.is_full:
            inputs[name] = torch.from_numpy(values)
    return inputs


def build_on_device(inputs: Tensors, ragged: RaggedBatch, form: BatchForm) -> Batch:
    """Widen, pad and label on the device of `inputs`. Queues a few kernels and never synchronises.

    Args:
        inputs: The result of `device_inputs` for this micro-batch, copied to the device.
        ragged: The micro-batch on the host, for shapes and row numbers.
        form: How the values are represented.

    Returns:
        The batch, with tensors on the device of `inputs`.
    """
    mask_BT, source_BT = (None, None) if ragged.is_full else _slots_of(inputs, ragged)
    unsigned = (1 << 8 * inputs[INPUT_IDS].element_size()) - 1
    tensors: Tensors = {}
    for name, fill in paddings(ragged, form.pad_id).items():
        values_N = _widened(inputs[name])
        if name == INPUT_IDS:
            values_N &= unsigned
        if mask_BT is None:
            tensors[name] = values_N.view(ragged.shape)
        else:
            tensors[name] = torch.where(mask_BT, values_N[source_BT], fill)
    if "row_targets" in inputs:
        labels = _widened(inputs["row_targets"])
        none = no_target(is_float=labels.is_floating_point())
        added = len(ragged.sequence_lengths) - len(labels)  # rows of padding
        tensors[TARGETS] = torch.nn.functional.pad(labels, (0, added), value=none)
    elif TARGETS not in tensors:
        ids_BT = tensors[INPUT_IDS]
        tensors[TARGETS] = (
            ids_BT.clone() if mask_BT is None else torch.where(mask_BT, ids_BT, IGNORED)
        )
        _ignore_without_context(tensors[TARGETS], inputs)
    if ragged.is_filler:
        labels = tensors[TARGETS]
        none = no_target(is_float=labels.is_floating_point())
        tensors[TARGETS] = torch.full_like(labels, none)
    if SEGMENTS in inputs:
        tensors[SEGMENTS] = inputs[SEGMENTS]
    elif mask_BT is not None:
        tensors[ATTENTION_MASK] = mask_BT
    return Batch(ragged, tensors, _build, form.ignore_index)


def _slots_of(inputs: Tensors, ragged: RaggedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which slots of a batch with padding have a token, [B, T] bool, and the index of this
    token, [B, T]; any index for padding."""
    lengths_B = inputs[_LENGTHS].long()
    column_T = torch.arange(ragged.padded_length, device=lengths_B.device)
    first_B = torch.cumsum(lengths_B, 0) - lengths_B
    source_BT = (first_B[:, None] + column_T).clamp_(max=len(inputs[INPUT_IDS]) - 1)
    return column_T < lengths_B[:, None], source_BT


def _widened(values: torch.Tensor) -> torch.Tensor:
    """Return integers as int64, floats unchanged."""
    return values if values.is_floating_point() else values.long()


def _ignore_without_context(labels_BT: torch.Tensor, inputs: Tensors) -> None:
    """Set the labels of prompts and of tokens without context to -100."""
    if "ignored" in inputs:
        labels_BT.view(-1).index_fill_(0, inputs["ignored"].long(), IGNORED)
    elif SEGMENTS in inputs:
        labels_BT.view(-1).index_fill_(0, inputs[SEGMENTS][:-1].long(), IGNORED)
    else:
        labels_BT[:, 0] = IGNORED


def _attention_mask(ragged: RaggedBatch, tensors: Tensors) -> torch.Tensor:
    """Return the mask of a batch without padding. Other batches have one from the start."""
    return torch.ones(ragged.shape, dtype=torch.bool, device=tensors[INPUT_IDS].device)


def _seq_idx(ragged: RaggedBatch, tensors: Tensors) -> torch.Tensor:
    segments = tensors[SEGMENTS]
    rows, length = ragged.shape
    slots = torch.arange(rows * length, dtype=torch.int32, device=segments.device)
    documents = torch.bucketize(slots, segments[1:], right=True, out_int32=True)
    return documents.view(ragged.shape)


def _position_ids(ragged: RaggedBatch, tensors: Tensors) -> torch.Tensor:
    if SEQ_IDX not in tensors:
        tensors[SEQ_IDX] = _seq_idx(ragged, tensors)
    rows, length = ragged.shape
    slots = torch.arange(rows * length, device=tensors[SEGMENTS].device)
    begins: torch.Tensor = tensors[SEGMENTS][tensors[SEQ_IDX]]
    return slots.view(ragged.shape) - begins


def _build(name: str, ragged: RaggedBatch, tensors: Tensors) -> torch.Tensor:
    with torch.inference_mode(False):  # the tensor is kept and may be used in training later
        return _BUILT_WHEN_ASKED[name](ragged, tensors)


_BUILT_WHEN_ASKED: dict[str, Callable[[RaggedBatch, Tensors], torch.Tensor]] = {
    ATTENTION_MASK: _attention_mask,
    POSITION_IDS: _position_ids,
    SEQ_IDX: _seq_idx,
}


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


def copy_ahead(
    source: WindowSource, copies: CopyStream, form: BatchForm, prefetch: int = COPIES_AHEAD
) -> Batches:
    """Yield batches whose copies and padding were queued on the copy stream in advance.

    `prefetch` is the number of batches that are ready ahead of the one that is yielded.

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
                if len(ahead) > prefetch:
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
