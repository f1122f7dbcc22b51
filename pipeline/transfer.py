"""Host to device, ahead of use: ragged ids on a copy stream, padded there, never waited for.

Two streams meet here. The copy stream reads page-locked memory and writes new tensors; the compute
stream reads these. An event orders each handover, and the memory a copy reads from is held until
its event has passed: the host runs on and would otherwise fill it with the next window.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tokenfeed.pipeline.batch import Batch, RaggedBatch, build_on_device, device_inputs
from tokenfeed.pipeline.plan import Position

__all__ = ["Placed", "copy_ahead"]

_COPIES_AHEAD = 2
"""Micro-batches copied to the device before they are asked for: one in use, one in flight."""

Placed = tuple[RaggedBatch, Position]
"""A micro-batch and the position after it."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A batch whose copy and padding are queued on the copy stream."""

    batch: Batch
    after: Position
    source: RaggedBatch
    """Holds the page-locked memory that the copy reads: it must live until `ready` has passed."""
    ready: torch.cuda.Event


def copy_ahead(
    batches: Iterator[Placed], device: torch.device, pad_id: int
) -> Iterator[tuple[Batch, Position]]:
    """Deliver batches whose copies and padding were queued on a copy stream beforehand.

    The compute stream waits for a batch's event, the host does not, except at the very end, for
    copies that were queued long before and have nearly always passed.
    """
    copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: deque[_Copy] = deque()
    delivered: deque[_Copy] = deque()  # given out; the copy itself may still be running
    try:
        for ragged, after in batches:
            ahead.append(_queue_copy(ragged, after, device, copy_stream, pad_id))
            if len(ahead) > _COPIES_AHEAD:
                delivered.append(ahead.popleft())
                yield _hand_over(delivered[-1], device)
            while delivered and delivered[0].ready.query():  # type: ignore[no-untyped-call]
                delivered.popleft()
        while ahead:
            delivered.append(ahead.popleft())
            yield _hand_over(delivered[-1], device)
    finally:
        for copy in (*delivered, *ahead):
            copy.ready.synchronize()


def _queue_copy(
    ragged: RaggedBatch,
    after: Position,
    device: torch.device,
    copy_stream: torch.cuda.Stream,
    pad_id: int,
) -> _Copy:
    ids, index = device_inputs(ragged)
    with torch.cuda.stream(copy_stream):
        batch = build_on_device(
            ids.to(device, non_blocking=True),
            index.pin_memory().to(device, non_blocking=True),
            ragged,
            pad_id,
        )
        return _Copy(batch, after, ragged, copy_stream.record_event())


def _hand_over(copy: _Copy, device: torch.device) -> tuple[Batch, Position]:
    """Make the stream that computes wait for the copy, and own its tensors."""
    compute_stream = torch.cuda.current_stream(device)
    compute_stream.wait_event(copy.ready)
    for tensor in copy.batch.values():
        tensor.record_stream(compute_stream)  # allocated on the copy stream, used on this one
    return copy.batch, copy.after
