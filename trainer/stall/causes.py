"""What a device may wait for, and in which words a report says so."""

from typing import Literal, get_args

__all__ = ["CAUSES", "DRAINING", "MEANINGS", "Cause", "Phase"]

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
CAUSES: tuple[Cause, ...] = get_args(Cause)

Phase = Cause | Literal["work", "calibration"]
"""What lies between two marks: the training's own work, or a cause."""

MEANINGS: dict[Cause, str] = {
    "data": "a batch that was not ready",
    "copy": "a batch that was ready, on its way to the device",
    "launch": "the host, which queues kernels more slowly than the device runs them",
    "wait": "the host, which had waited for a value (`.item()`) and lost its lead",
    "log": "a progress line",
    "checkpoint": "a checkpoint",
    "evaluation": "an evaluation",
    "garbage collection": "Python's collector",
    "allocator": "memory that had to be given back and asked for again",
    "recompilation": "torch.compile, again",
    "communication": "other ranks",
    "other": "host code between steps",
}

DRAINING: frozenset[Cause] = frozenset(CAUSES) - {"data", "copy", "launch", "other"}
"""Now and then, or for no good reason: what the host loses of its lead here, it owes."""
