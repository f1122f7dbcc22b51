"""The causes of a stall, with their thresholds and remedies."""

from typing import Literal, NamedTuple

Cause = Literal[
    "data",
    "copy",
    "launch",
    "wait",
    "log",
    "checkpoint",
    "evaluation",
    "garbage collection",
    "allocator",
    "recompilation",
    "communication",
    "other",
]

Phase = Cause | Literal["work", "calibration"]
"""The activity between two marks: the training's own work, or a cause of stall."""


class About(NamedTuple):
    """A cause.

    The thresholds of data and launch are those of TensorFlow's input-pipeline analyzer. Causes that
    should cost nothing are named from 1 % on.
    """

    meaning: str
    """What the device waited for."""
    remedy: str
    """General advice on what to change, for any training loop."""
    named: float
    """Share of the time from which advice names the cause."""
    drains: bool = False
    """Whether the cause uses up the host's lead, so that later idle time is charged to it."""
    interrupts: bool = False
    """Whether the cause happens inside a span of work, which continues afterwards."""


ABOUT: dict[Cause, About] = {
    "data": About(
        "a batch that was not ready",
        "batches come late: use more workers in the loader, prefetch more, tokenize beforehand, or "
        "read from a faster disk",
        named=0.05,
    ),
    "copy": About(
        "the copy of a batch that was ready",
        "batches are copied while the device waits: page-lock them and copy ahead with "
        "`non_blocking=True`, and send int32, not int64",
        named=0.01,
    ),
    "launch": About(
        "the host, which queues kernels more slowly than they run",
        "kernels are queued more slowly than they run: use larger micro-batches or `torch.compile`",
        named=0.03,
    ),
    "wait": About(
        "the host, which was late because it had waited for a value (.item())",
        "the host waits for values such as `loss.item()`: read them a step later, or only when you "
        "log",
        named=0.01,
        drains=True,
    ),
    "log": About(
        "a progress line",
        "log less often",
        named=0.01,
        drains=True,
    ),
    "checkpoint": About(
        "the disk, which still wrote the checkpoint before; on a CPU also the copy of the state",
        "save less often, or in the background",
        named=0.01,
        drains=True,
    ),
    "evaluation": About(
        "the metrics of the validation split",
        "evaluate less often, or on fewer batches",
        named=0.05,
        drains=True,
    ),
    "garbage collection": About(
        "a full run of Python's garbage collector",
        "call `gc.freeze()` after the first steps and `gc.disable()`, and collect at progress "
        "lines",
        named=0.005,
        drains=True,
        interrupts=True,
    ),
    "allocator": About(
        "memory that was freed and allocated again",
        "memory is freed and allocated again: set "
        "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, or use fewer shapes",
        named=0.005,
        drains=True,
    ),
    "recompilation": About(
        "torch.compile, which compiled again after the first steps",
        "torch.compile compiles again: bound the shapes, or mark them dynamic",
        named=0.01,
        drains=True,
        interrupts=True,
    ),
    "communication": About(
        "the exchange of gradients with other ranks, and late ranks",
        "ranks wait for each other: `meter.gather()` finds the slowest one",
        named=0.05,
        drains=True,
    ),
    "other": About(
        "host code between steps",
        "host code runs between steps: bracket it with `meter.cause(...)` to see which part",
        named=0.01,
    ),
}
"""Each cause, in the order of reports."""

CAUSES: tuple[Cause, ...] = tuple(ABOUT)

COUNTED: frozenset[Cause] = frozenset(
    {"log", "checkpoint", "evaluation", "garbage collection", "recompilation"}
)
"""Causes that occur in few steps, each time between two marks.

Every occurrence is measured, so these causes do not widen any interval. The steps between these
events are a sample of the run. The events themselves are not a sample.
"""
