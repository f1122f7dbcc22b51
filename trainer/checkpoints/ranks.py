"""Ranks that save and load together, however slow the disk is.

A rank that sends nothing for 10 minutes counts as hung. Writing or reading a large checkpoint may
take longer. So ranks exchange a message every minute while one of them is busy with the disk.
"""

import datetime
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch.distributed as dist

from tokenfeed.trainer.distributed.world import World

__all__ = ["Gather", "gather_alone", "run_slow", "thread_gather"]

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
"""A function that returns the values of all ranks that save, by rank."""

_LONGEST_SAVE = datetime.timedelta(days=1)


def run_slow(world: World, job: Callable[[], T], message_s: float = 60.0) -> T:
    """Run a job that waits for a disk. All ranks call this, and return when all jobs are done.

    Args:
        world: All ranks.
        job: What this rank does, on another thread.
        message_s: Seconds between messages to the other ranks.

    Raises:
        Exception: What this rank's job raised. Other ranks learn of it at their next message.
    """
    if world.size == 1:
        return job()
    with ThreadPoolExecutor(1, "disk") as pool:
        future = pool.submit(job)
        while not all(world.all_gather(_is_done(future, message_s))):
            pass
    return future.result()


def gather_alone(value: Any) -> list[Any]:
    """Return the value of the only rank that saves."""
    return [value]


def thread_gather(world: World) -> Gather:
    """Return a function that gathers values of all ranks. One thread of each rank may call it.

    It has a process group of its own, because messages of two threads of a group could be
    mistaken for each other. If a rank dies, its connections close and the function raises.
    """
    group = dist.new_group(backend="gloo", timeout=_LONGEST_SAVE)

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * world.size
        dist.all_gather_object(values, value, group=group)
        return values

    return gather


def _is_done(future: Future[Any], seconds: float) -> bool:
    wait([future], timeout=seconds)
    return future.done()
